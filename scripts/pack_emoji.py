"""Make the emoji sheets of the package: `python scripts/pack_emoji.py SHEET.png CAPTIONS.json`.

SHEET contains images of 64 x 64 pixels, 64 per row. The output depends only on the input, so run it again only if that changes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from PIL import Image

from linnet.data.sources.emoji import FOLDER, SHEET_COLUMNS, SIZES

SIZE = 64


def pack(sheet_path: Path, captions_path: Path, out: Path) -> None:
    captions = json.loads(captions_path.read_text())
    sheet = Image.open(sheet_path).convert("RGB")
    rows = -(-len(captions) // SHEET_COLUMNS)
    if sheet.size != (SHEET_COLUMNS * SIZE, rows * SIZE):
        raise SystemExit(f"{sheet_path} is {sheet.size}, not {SHEET_COLUMNS} x {rows} images of {SIZE} pixels")
    out.mkdir(exist_ok=True)
    (out / "captions.json").write_text(json.dumps(captions, ensure_ascii=False, indent=0) + "\n")
    for size in SIZES:
        # Box filter: 64 is a multiple of both sizes, so images do not bleed into their neighbours.
        sheet.reduce(SIZE // size).save(out / f"{size}.png", optimize=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    pack(Path(sys.argv[1]), Path(sys.argv[2]), FOLDER)
