"""`linnet imagine`."""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from linnet.api.imagine import imagine
from linnet.cli.flags import Layout
from linnet.cli.parse import named_as_flags, parse
from linnet.core.errors import invalid
from linnet.core.formatting import slugify
from linnet.core.local_path import FreeText

PRIOR, PAINTER = Path("runs/prior-emoji"), Path("runs/emoji-imagine")


@dataclasses.dataclass(frozen=True)
class Flags:
    layout: ClassVar[Layout] = {
        "": ("prior", "painter", "n", "seed", "out", "checkpoint", "json"),
        "sampling": ("steps", "prior-guidance", "guidance", "temperature", "top-p"),
    }
    text: Annotated[FreeText, tyro.conf.Positional]
    """Text prompt."""
    prior: Path = PRIOR
    """Prior run, which predicts an image embedding from the text embedding."""
    painter: Path = PAINTER
    """Run of a conditional image model (trained with data.condition), which generates images from the embedding."""
    n: int = 4
    """Number of images. The first does not depend on it."""
    seed: int = 0
    """Random seed. Image i uses seed + i."""
    steps: int | None = None
    """Number of sampling steps of the prior. Default: 64."""
    prior_guidance: float = 1.0
    """Classifier-free guidance scale of the prior. 1: no guidance."""
    guidance: float | None = None
    """Classifier-free guidance scale of the image model; other values than 1 double the cost. Default: 1.5 if the model
    supports it, else 1."""
    temperature: float = 1.0
    """Sampling temperature of the image model. 0: greedy decoding."""
    top_p: float = 1.0
    """Nucleus sampling threshold of the image model."""
    out: Path | None = None
    """PNG file for the contact sheet; each image is also written to a file of its own next to it. Default:
    PAINTER/samples/imagined/TEXT.png."""
    checkpoint: str = "best"
    """Checkpoint of both runs: best (by validation loss), latest, or a step."""
    json: bool = False
    """Print one JSON object instead of text."""


def imagine_command(argv: list[str]) -> int:
    flags = parse(
        Flags,
        argv,
        "imagine",
        "Generate images from a text: a prior samples an image embedding, and a conditional image model (the painter) generates "
        "images from it. The same seed gives the same images.",
    )
    if flags.out is not None and flags.out.suffix.lower() != ".png":
        raise invalid("--out", str(flags.out), "the path of a .png", f"use {flags.out}.png")
    with named_as_flags(flags), warnings.catch_warnings(record=True) as remarks:
        images = imagine(
            flags.text,
            prior=flags.prior,
            painter=flags.painter,
            n=flags.n,
            seed=flags.seed,
            steps=flags.steps,
            prior_guidance=flags.prior_guidance,
            guidance=flags.guidance,
            temperature=flags.temperature,
            top_p=flags.top_p,
            checkpoint=flags.checkpoint,
        )
    for remark in remarks:
        print(remark.message, file=sys.stderr)
    name = slugify(flags.text.strip().lower(), "imagined")
    sheet = flags.out or flags.painter / "samples" / "imagined" / f"{name}.png"
    with named_as_flags(flags):
        files, _ = images.save_as([sheet.with_name(f"{sheet.stem}_{i:04d}.png") for i in range(len(images))], sheet)
    nearest = images.nearest or [()] * len(images)
    records: list[dict[str, Any]] = [
        {
            "file": str(file),
            "seed": seed,
            "nearest": [{"caption": near.caption, "cosine": round(near.cosine, 4)} for near in found],
        }
        for file, seed, found in zip(files, images.seeds, nearest, strict=True)
    ]
    if flags.json:
        shape = images.pixels.shape[1:]
        description = {"text": flags.text, "prior": str(flags.prior), "painter": str(flags.painter), "shape": shape}
        print(json.dumps(description | {"sheet": str(sheet), "pictures": records}))
        return 0
    for record in records:
        print(f"{record['file']}  (seed {record['seed']})")
        for near in record["nearest"]:
            print(f"    {near['cosine']:.2f}  {near['caption']}")
    print(f"{sheet} shows all of them. The captions above are those of the dataset's images nearest to each embedding.")
    return 0
