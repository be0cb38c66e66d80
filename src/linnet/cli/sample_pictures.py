"""`linnet sample` for image models: PNGs, a contact sheet, and images completed from their upper part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from linnet.cli.sample_flags import Flags, drawing_settings
from linnet.core.errors import invalid
from linnet.core.files import atomic_write
from linnet.data.images import BrokenPicture, contact_sheet, decode_pixels, to_image
from linnet.generate.samples import SHEET_COLUMNS, sample_pictures, sheet_scale
from linnet.runs.load import Run

if TYPE_CHECKING:
    from jaxtyping import UInt8

AT_ONCE = 16
"""Images per batch. Larger batches would not be faster, and the limit bounds the memory."""


def paint(flags: Flags, run: Run, shape: tuple[int, int, int]) -> int:
    _refuse_text_flags(flags)
    given = [_given(path, shape[0]) for path in flags.complete]
    n_rows = int(shape[0] * flags.keep) if given else 0
    seen = [picture[:n_rows].tobytes() for picture in given for _ in range(flags.n)] or [b""] * flags.n
    seeds = [(flags.seed + i % flags.n) % 2**32 for i in range(len(seen))]
    painted = []
    for at in range(0, len(seen), AT_ONCE):
        part = seen[at : at + AT_ONCE]
        settings = drawing_settings(flags, len(part), 1.0)
        painted.append(
            sample_pictures(
                run.writer, run.cfg, run.params, run.buffers, shape, part, settings, seeds[at : at + AT_ONCE]
            )
        )
    pictures = np.concatenate(painted)
    files = _write(flags, pictures, given, shape)
    if flags.json:
        record = {"run": str(flags.run), "pictures": [str(file) for file in files[:-1]], "sheet": str(files[-1])}
        print(json.dumps(record | {"seen_rows": n_rows, "shape": shape}))
        return 0
    print(f"{len(pictures)} pictures are in {files[-1].parent}, all of them on {files[-1].name}.")
    return 0


def _write(
    flags: Flags, pictures: UInt8[np.ndarray, "n h w 3"], given: list[np.ndarray], shape: tuple[int, int, int]
) -> list[Path]:
    """Write one PNG per image and a contact sheet. Completed images form rows, each after the image it was completed from."""
    folder = flags.out or flags.run / "samples" / "pictures"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"picture_{i:04d}.png" for i in range(len(pictures))]
        for file, picture in zip(files, pictures, strict=True):
            atomic_write(file, to_image(picture))
        rows = [[original, *pictures[i * flags.n : (i + 1) * flags.n]] for i, original in enumerate(given)]
        all_in_rows = np.stack([picture for row in rows for picture in row]) if rows else pictures
        sheet = folder / "sheet.png"
        columns = flags.n + 1 if rows else SHEET_COLUMNS
        atomic_write(sheet, contact_sheet(all_in_rows, columns, sheet_scale(shape)))
    except OSError as error:
        raise invalid(
            "--out", str(folder), f"a folder that can be written ({error.strerror})", "choose another"
        ) from None
    return [*files, sheet]


def _refuse_text_flags(flags: Flags) -> None:
    if flags.prompt or flags.prompt_file is not None or flags.stop or flags.max_tokens is not None or flags.ignore_end:
        raise invalid(
            "--prompt / --prompt-file / --stop / --max-tokens / --ignore-end",
            "given",
            "left out: this run paints pictures",
            "use --complete PICTURE to begin with one",
        )
    if not 0 <= flags.keep <= 1:
        raise invalid("--keep", flags.keep, "between 0 and 1", "use 0.5")


def _given(path: Path, size: int) -> UInt8[np.ndarray, "h w 3"]:
    try:
        return decode_pixels(path.read_bytes(), size)
    except OSError as error:
        raise invalid(
            "--complete", str(path), f"a file that can be read ({error.strerror})", "check the path"
        ) from None
    except BrokenPicture as error:
        raise invalid(
            "--complete", str(path), f"a picture that can be read ({error.reason})", "choose another"
        ) from None
