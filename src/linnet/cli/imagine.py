"""`linnet imagine`."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from linnet.cli import file_names
from linnet.cli.parse import parse
from linnet.core.errors import invalid
from linnet.core.files import atomic_write
from linnet.core.local_path import FreeText

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import UInt8

    from linnet.generate.text_to_image import Imagination

PRIOR, PAINTER = Path("runs/prior-emoji"), Path("runs/emoji-imagine")
N_NEAREST = 3
USUAL_GUIDANCE = 1.5


@dataclasses.dataclass(frozen=True)
class Flags:
    text: Annotated[FreeText, tyro.conf.Positional]
    """Text prompt."""
    prior: Path = PRIOR
    """Prior run, which predicts an image embedding from the text embedding."""
    painter: Path = PAINTER
    """vq run trained on images with data.condition, which generates the images."""
    n: int = 4
    """Number of images. The first does not depend on it."""
    seed: int = 0
    """Random seed. Image i uses seed + i."""
    steps: int | None = None
    """Sampling steps of the prior. Default: 64."""
    prior_guidance: float = 1.0
    """Classifier-free guidance scale of the prior. 1: no guidance."""
    guidance: float | None = None
    """Classifier-free guidance scale of the painter, at twice the cost. 1: no guidance. Default: 1.5 if the painter supports it."""
    temperature: float = 1.0
    """Sampling temperature of the painter. 0: greedy."""
    top_p: float = 1.0
    """Nucleus sampling threshold of the painter."""
    out: Path | None = None
    """PNG with all images; each is also written to its own file next to it. Default: PAINTER/samples/imagined/TEXT.png."""
    checkpoint: str = "best"
    """Checkpoint of both runs: `best` (by validation loss), `latest`, or a step."""
    json: bool = False
    """Print one JSON object."""


def imagine_command(argv: list[str]) -> int:
    flags = parse(
        Flags,
        argv,
        "imagine",
        "Paints pictures of a text: a prior draws what their embedding might be, a painter paints that. The same seed gives the same.",
    )
    _check(flags)
    from linnet.cli.startup import init_jax
    from linnet.generate.text_to_image import open_imagination
    from linnet.models.prior.sampling import guidance_remark
    from linnet.nn.sampling import sampling_settings

    settings = sampling_settings(1, temperature=flags.temperature, top_p=flags.top_p)
    init_jax()
    both = open_imagination(flags.prior, flags.painter, flags.checkpoint)
    seeds = [(flags.seed + i) % 2**32 for i in range(flags.n)]
    remark = guidance_remark(flags.prior_guidance, both.prior.cfg.prior)
    print(remark or "", end="\n" if remark else "", file=sys.stderr)
    embeds = both.embeds(flags.text, seeds, steps=flags.steps, guidance=flags.prior_guidance)
    nearest = both.nearest(embeds, N_NEAREST) or [[] for _ in seeds]
    pictures = both.paint(embeds, settings, seeds, guidance=_guidance(flags, both))
    sheet, files = _write(flags, pictures)
    records: list[dict[str, Any]] = [
        {
            "file": str(file),
            "seed": seed,
            "nearest": [{"caption": caption, "cosine": round(cosine, 4)} for caption, cosine in found],
        }
        for file, seed, found in zip(files, seeds, nearest, strict=True)
    ]
    if flags.json:
        about = {"text": flags.text, "prior": str(flags.prior), "painter": str(flags.painter), "shape": both.shape}
        print(json.dumps(about | {"sheet": str(sheet), "pictures": records}))
        return 0
    for record in records:
        print(f"{record['file']}  (seed {record['seed']})")
        for near in record["nearest"]:
            print(f"    {near['cosine']:.2f}  {near['caption']}")
    print(f"All of them are on {sheet}. Beside each: the captions of the real pictures nearest to what was imagined.")
    return 0


def _check(flags: Flags) -> None:
    """Validate the flags before any run is opened."""
    if not flags.text.strip():
        raise invalid("TEXT", flags.text, "some words", 'write them, as in `linnet imagine "red heart"`')
    if flags.n < 1:
        raise invalid("--n", flags.n, "at least 1", "use 4")
    if not 0 <= flags.seed < 2**32:
        raise invalid("--seed", flags.seed, "between 0 and 2**32 - 1", "use 0")
    for name, value in (("--guidance", flags.guidance), ("--prior-guidance", flags.prior_guidance)):
        if value is not None and not 0 <= value <= 100:
            raise invalid(name, value, "between 0 and 100", "use 1, which is none")
    if flags.out is not None and flags.out.suffix.lower() != ".png":
        raise invalid("--out", str(flags.out), "the path of a .png", f"use {flags.out}.png")


def _guidance(flags: Flags, both: Imagination) -> float:
    """Return the guidance scale. The default gave the most faithful images (docs/imagine.md), but needs a painter that was also
    trained without embeddings."""
    if flags.guidance is not None:
        return flags.guidance
    return USUAL_GUIDANCE if both.painter.cfg.vq.p_drop_condition else 1.0


def _write(flags: Flags, pictures: UInt8[np.ndarray, "n h w 3"]) -> tuple[Path, list[Path]]:
    from linnet.data.images import contact_sheet, to_image
    from linnet.generate.samples import SHEET_COLUMNS, sheet_scale

    name = file_names.slugify(flags.text.strip().lower(), "imagined")
    sheet = flags.out or flags.painter / "samples" / "imagined" / f"{name}.png"
    files = [sheet.with_name(f"{sheet.stem}_{i:04d}.png") for i in range(len(pictures))]
    height, width, channels = pictures.shape[1:]
    try:
        sheet.parent.mkdir(parents=True, exist_ok=True)
        for file, picture in zip(files, pictures, strict=True):
            atomic_write(file, to_image(picture))
        atomic_write(sheet, contact_sheet(pictures, SHEET_COLUMNS, sheet_scale((height, width, channels))))
    except OSError as error:
        raise invalid("--out", str(sheet), f"a file that can be written ({error.strerror})", "choose another") from None
    return sheet, files
