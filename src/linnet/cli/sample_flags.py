"""Flags of `linnet sample`, and the sampling settings that they give."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from linnet.core.dtypes import WeightDtype
from linnet.core.errors import invalid
from linnet.core.local_path import FreeText

if TYPE_CHECKING:
    from linnet.nn.sampling import SamplingSettings


@dataclasses.dataclass(frozen=True)
class Flags:
    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    prompt: FreeText = ""
    """What the text begins with. Priors: what the picture shows."""
    prompt_file: Path | None = None
    """A file to take the prompt from."""
    prompt_ids: tuple[int, ...] = ()
    """The prompt as ids of the model's vocabulary, in place of a text."""
    add_special_tokens: bool | None = None
    """False: the model's begin id, if it has one, is not put in front of the prompt."""
    n: int = 1
    """How many samples. The first is the same whatever their number. Priors: so many are drawn, and the one most like the text is
    kept."""
    max_tokens: int | None = None
    """The longest a text may get (512); a `moe` run ends at its context. A picture is always whole."""
    temperature: float = 1.0
    """0 takes the likeliest token always."""
    top_p: float | None = None
    """Only the likeliest tokens that hold this probability together: 0.9 for text, 1 for pictures."""
    top_k: int = 0
    """Only the k likeliest tokens; 0: all."""
    min_p: float = 0.0
    """Only tokens at least so likely, relative to the likeliest."""
    repetition_penalty: float = 1.0
    seed: int = 0
    """Sample i is drawn by seed + i."""
    stop: tuple[FreeText, ...] = ()
    """End before any of these strings."""
    ignore_end: bool = False
    """Go on after the end of a document."""
    out: Path | None = None
    """Pictures: the folder for the PNGs and the sheet; RUN/samples/pictures if not given. Priors: for the embedding and the sheet of
    its nearest pictures; RUN/samples."""
    complete: tuple[Path, ...] = ()
    """Pictures: go on from the upper part of each of these (`--n` times each), which stays as it is."""
    keep: float = 0.5
    """Pictures: the share of the rows of `--complete` that is seen."""
    embedding: Path | None = None
    """Priors: an .npy with text embeddings (one, or a row each), in place of a prompt."""
    text_encodings: Path | None = None
    """Priors with model.text_encodings: an .npy with the token encodings that belong to `--embedding`, [texts, positions, width] or
    [positions, width] of one text; all zeros is padding. With a prompt they are computed."""
    steps: int | None = None
    """Priors: denoising steps (16 with dpm, 64 with ddim, all with ddpm)."""
    solver: Literal["dpm", "ddim", "ddpm"] | None = None
    """Priors: DPM-Solver++(2M) if not given, DDIM or DDPM."""
    guidance: float = 1.0
    """Priors: how much further than the text says; 1 is as trained."""
    nearest: int = 8
    """Priors: how many of the data's pictures to show."""
    checkpoint: str = "best"
    """`best` (by validation loss; the latest if there is none), `latest`, or a step."""
    weights: WeightDtype = "float32"
    """The bits that weights are held in."""
    mesh: str = ""
    """Devices that share the model, as model=2 or model=2,expert=2; one if not given."""
    json: bool = False
    """Print one JSON object when all is done, instead of streaming."""


def refuse_given(flags: Flags, names: tuple[str, ...], why: str) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(flags)}
    for name in names:
        if getattr(flags, name) != defaults[name]:
            shown = getattr(flags, name)
            field = f"--{name.replace('_', '-')}"
            raise invalid(field, str(shown) if isinstance(shown, Path) else shown, f"left out: {why}", "leave it out")


def drawing_settings(flags: Flags, n: int, top_p: float) -> SamplingSettings:
    from linnet.nn.sampling import sampling_settings

    return sampling_settings(
        n,
        temperature=flags.temperature,
        top_p=top_p if flags.top_p is None else flags.top_p,
        top_k=flags.top_k,
        min_p=flags.min_p,
        repetition_penalty=flags.repetition_penalty,
    )
