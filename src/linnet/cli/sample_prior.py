"""`linnet sample` for a prior: predict an image embedding from a text, and find its nearest images in the run's data."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from linnet.cli.parse import named_as_flags
from linnet.core.errors import invalid
from linnet.core.formatting import slugify

if TYPE_CHECKING:
    from pathlib import Path

    from linnet.api.images import EmbeddingSamples
    from linnet.api.run import Run
    from linnet.cli.sample_flags import Flags


def predict(flags: Flags, run: Run, prompt: bytes) -> int:
    from linnet.models.prior.sampling import effective_guidance, guidance_remark

    with named_as_flags(flags):
        names, given = _texts(flags, prompt.decode(errors="replace").strip())
        found = run.sample(
            **given,
            n=flags.n,
            steps=flags.steps,
            solver=flags.solver or "dpm",
            guidance=flags.guidance,
            seed=flags.seed,
            nearest=flags.nearest,
        )
    names = names if len(names) == len(found) else [f"{names[0]}[{i}]" for i in range(len(found))]
    files = _write(flags, names[0].split("[")[0] if len(names) > 1 else names[0], found)
    if (unguided := guidance_remark(flags.guidance, run.config.prior)) is not None:
        print(unguided, file=sys.stderr)
    if flags.json:
        record = {
            "run": str(flags.run),
            "steps": found.steps,
            "solver": flags.solver or "dpm",
            "guidance": effective_guidance(flags.guidance, run.config.prior),
            "texts": [_record(name, i, found) for i, name in enumerate(names)],
            "files": [str(file) for file in files],
            "remark": found.note,
        }
        print(json.dumps(record))
        return 0
    for i, name in enumerate(names):
        cosine = "" if found.cosines is None else f"; cosine with the text {found.cosines[i].max():.3f}"
        print(f"{name} (seed {found.seeds[i]}{cosine})")
        for near in found.nearest[i] if found.nearest else ():
            print(f"  {near.cosine:.3f}  {near.caption or f'row {near.row}'}")
    print(found.note or "", end="\n" if found.note else "")
    print("Written: " + ", ".join(str(file) for file in files))
    return 0


def _texts(flags: Flags, prompt: str) -> tuple[list[str], dict[str, Any]]:
    """Return a name for the texts, and the arguments of `Run.sample` that give them."""
    if flags.embedding is not None:
        if prompt:
            raise invalid("embedding", str(flags.embedding), "given without a prompt", "leave one of them out")
        encodings = None if flags.text_encodings is None else _read("text_encodings", flags.text_encodings)
        given = {"embeddings": _read("embedding", flags.embedding), "text_encodings": encodings}
        return [flags.embedding.stem], given
    if flags.text_encodings is not None:
        needs = "left out without --embedding: those of a prompt are computed"
        raise invalid("text_encodings", str(flags.text_encodings), needs, "leave it out, or add --embedding FILE.npy")
    if not prompt:
        raise invalid("prompt", prompt, "a text for the prior to read", "use --prompt TEXT, or --embedding FILE.npy")
    return [prompt], {"texts": prompt}


def _read(field: str, path: Path) -> Any:
    from linnet.data.sources.npy import as_float32, map_npy

    try:
        return as_float32(map_npy(path), str(path))
    except (ValueError, TypeError) as error:
        raise invalid(field, str(path), f"an .npy file of numbers ({error})", "check the path") from None


def _write(flags: Flags, text: str, found: EmbeddingSamples) -> list[Path]:
    """Write the embeddings and, if the data has images, a contact sheet with one row per text, the nearest image first."""
    from linnet.core.files import atomic_write
    from linnet.data.npy_writer import write_array

    folder = flags.out or flags.run / "samples"
    file = folder / f"{slugify(text.strip(), 'prior')}-seed{flags.seed}.npy"
    write_array(file, found.embeddings)
    if (sheet := found.sheet()) is None:
        return [file]
    atomic_write(file.with_suffix(".png"), sheet)
    return [file, file.with_suffix(".png")]


def _record(name: str, i: int, found: EmbeddingSamples) -> dict[str, Any]:
    near = found.nearest[i] if found.nearest else ()
    return {
        "text": name,
        "seed": found.seeds[i],
        "cosines_with_text": None if found.cosines is None else found.cosines[i].tolist(),
        "embedding": found.embeddings[i].tolist(),
        "nearest": [{"row": one.row, "cosine": one.cosine, "caption": one.caption} for one in near],
    }
