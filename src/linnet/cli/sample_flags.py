"""Flags of `linnet sample`, and their sampling settings."""

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
    """Text prompt. Priors: a description of the image."""
    prompt_file: Path | None = None
    """Read the prompt from this file."""
    prompt_ids: tuple[int, ...] = ()
    """The prompt as token ids, instead of a text."""
    add_special_tokens: bool | None = None
    """False: do not prepend the model's BOS id to the prompt."""
    n: int = 1
    """Number of samples. The first does not depend on it. Priors: number of candidates, of which the most similar to the text is
    kept."""
    max_tokens: int | None = None
    """Maximum number of new tokens (default: 512). A `moe` run stops at its context length; images are always complete."""
    temperature: float = 1.0
    """Sampling temperature. 0: greedy."""
    top_p: float | None = None
    """Nucleus sampling threshold. Default: 0.9 for text, 1 for images."""
    top_k: int = 0
    """Sample from the k most likely tokens. 0: all."""
    min_p: float = 0.0
    """Minimum probability relative to the most likely token."""
    repetition_penalty: float = 1.0
    seed: int = 0
    """Random seed. Sample i uses seed + i."""
    stop: tuple[FreeText, ...] = ()
    """Stop strings, which are not part of the output."""
    ignore_end: bool = False
    """Continue after EOS."""
    out: Path | None = None
    """Output folder. Images: for the PNGs and the contact sheet (default: RUN/samples/pictures). Priors: for the embedding and the
    contact sheet of its nearest images (default: RUN/samples)."""
    complete: tuple[Path, ...] = ()
    """Images: complete each of these from its upper part, which is kept (`--n` samples each)."""
    keep: float = 0.5
    """Images: fraction of the rows of `--complete` that is kept."""
    embedding: Path | None = None
    """Priors: an .npy with one text embedding, or one per row, instead of a prompt."""
    text_encodings: Path | None = None
    """Priors with model.text_encodings: an .npy with the token encodings of `--embedding`, of shape [texts, positions, width], or
    [positions, width] for one text; all-zero rows are padding. For a prompt they are computed."""
    steps: int | None = None
    """Priors: sampling steps. Default: 16 with dpm, 64 with ddim, all with ddpm."""
    solver: Literal["dpm", "ddim", "ddpm"] | None = None
    """Priors: DPM-Solver++(2M) (the default), DDIM or DDPM."""
    guidance: float = 1.0
    """Priors: classifier-free guidance scale. 1: no guidance."""
    nearest: int = 8
    """Priors: number of nearest images of the dataset to show."""
    checkpoint: str = "best"
    """`best` (by validation loss; the latest if there is none), `latest`, or a step."""
    weights: WeightDtype = "float32"
    """Weight dtype."""
    mesh: str = ""
    """Device mesh for the model, such as model=2 or model=2,expert=2. Default: one device."""
    json: bool = False
    """Print one JSON object at the end, instead of streaming."""


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
