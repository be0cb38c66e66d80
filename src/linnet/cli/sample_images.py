"""`linnet sample` for image models: PNGs, a contact sheet, and images completed from their upper part."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from linnet.cli.parse import named_as_flags
from linnet.cli.sample_flags import Flags
from linnet.core.errors import invalid

if TYPE_CHECKING:
    from linnet.api.run import Run


def write_images(flags: Flags, run: Run) -> int:
    _check_no_text_flags(flags)
    with named_as_flags(flags):
        images = run.generate_images(
            flags.n,
            complete=flags.complete,
            keep=flags.keep,
            temperature=flags.temperature,
            top_p=1.0 if flags.top_p is None else flags.top_p,
            top_k=flags.top_k,
            min_p=flags.min_p,
            repetition_penalty=flags.repetition_penalty,
            seed=flags.seed,
        )
        files, sheet = images.save(flags.out or flags.run / "samples" / "pictures")
    if flags.json:
        shape = images.pixels.shape[1:]
        n_rows = int(shape[0] * flags.keep) if flags.complete else 0
        record = {"run": str(flags.run), "pictures": [str(file) for file in files], "sheet": str(sheet)}
        print(json.dumps(record | {"seen_rows": n_rows, "shape": shape}))
        return 0
    print(f"{len(images)} images are in {sheet.parent}; {sheet.name} shows all of them.")
    return 0


def _check_no_text_flags(flags: Flags) -> None:
    if flags.prompt or flags.prompt_file is not None or flags.stop or flags.max_tokens is not None or flags.ignore_end:
        raise invalid(
            "--prompt / --prompt-file / --stop / --max-tokens / --ignore-end",
            "given",
            "left out: this run generates images",
            "use --complete IMAGE to start from an image",
        )
