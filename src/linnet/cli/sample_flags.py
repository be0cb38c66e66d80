"""Flags of `linnet sample`, and their sampling settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from linnet.cli.flags import Layout
from linnet.core.dtypes import WeightDtype
from linnet.core.errors import invalid
from linnet.core.local_path import FreeText

if TYPE_CHECKING:
    from linnet.nn.sampling import SamplingSettings


@dataclasses.dataclass(frozen=True)
class Flags:
    layout: ClassVar[Layout] = {
        "": ("prompt", "prompt-file", "max-tokens", "n", "seed", "out", "json"),
        "sampling": ("temperature", "top-p", "top-k", "min-p", "repetition-penalty", "stop", "ignore-end"),
        "token": ("prompt-ids", "add-special-tokens"),
        "image": ("complete", "keep"),
        "prior": ("steps", "solver", "guidance", "nearest", "embedding", "text-encodings"),
        "model": ("checkpoint", "weights", "mesh"),
    }
    run: Annotated[Path, tyro.conf.Positional]
    """Run folder."""
    prompt: FreeText = ""
    """Text prompt; for a prior, a description of the image. Default: empty."""
    prompt_file: Path | None = None
    """Read the prompt from this file. Default: use --prompt."""
    prompt_ids: tuple[int, ...] = ()
    """Prompt as token ids, instead of text. Default: use --prompt."""
    add_special_tokens: bool | None = None
    """Whether to prepend the model's BOS id to the prompt. Default: as in training."""
    n: int = 1
    """Number of samples; the first does not depend on it. Priors: number of candidates, of which the one most similar to the
    text is kept."""
    max_tokens: int | None = None
    """Maximum number of new tokens. A `moe` run also stops at its context length; images are always complete. Default: 512."""
    temperature: float = 1.0
    """Sampling temperature. 0: greedy decoding."""
    top_p: float | None = None
    """Nucleus sampling threshold. Default: 0.9 for text, 1 for images."""
    top_k: int = 0
    """Top-k sampling: sample from the k most likely tokens. 0: off."""
    min_p: float = 0.0
    """Min-p sampling: minimum probability, relative to that of the most likely token. 0: off."""
    repetition_penalty: float = 1.0
    """Repetition penalty: divide positive logits of earlier tokens by this, multiply negative ones. 1: off."""
    seed: int = 0
    """Random seed. Sample i uses seed + i."""
    stop: tuple[FreeText, ...] = ()
    """Stop strings: generation ends before them. Default: none."""
    ignore_end: bool = False
    """Continue after EOS."""
    out: Path | None = None
    """Output folder for images and their contact sheet, or for a prior's embedding and its nearest images. Default:
    RUN/samples/pictures; RUN/samples for a prior."""
    complete: tuple[Path, ...] = ()
    """Complete these images: the upper part is kept, the rest is sampled (--n samples each). Default: none."""
    keep: float = 0.5
    """Fraction of the rows of --complete that is kept."""
    embedding: Path | None = None
    """An .npy file with one text embedding, or one per row, instead of a prompt. Default: encode the prompt."""
    text_encodings: Path | None = None
    """For models with model.text_encodings: an .npy file with the token encodings of --embedding, of shape [texts, positions,
    width], or [positions, width] for one text; all-zero rows are padding. Default: encode the prompt."""
    steps: int | None = None
    """Number of sampling steps. Default: 16 with dpm, 64 with ddim, all with ddpm."""
    solver: Literal["dpm", "ddim", "ddpm"] | None = None
    """Sampler: DPM-Solver++(2M), DDIM or DDPM. Default: dpm."""
    guidance: float = 1.0
    """Classifier-free guidance scale. 1: no guidance."""
    nearest: int = 8
    """Number of nearest images of the dataset to show."""
    checkpoint: str = "best"
    """Checkpoint to load: best (by validation loss; the latest if none was evaluated), latest, or a step."""
    weights: WeightDtype = "float32"
    """Weight dtype."""
    mesh: str = ""
    """Device mesh, such as model=2 or model=2,expert=2. Default: one device."""
    json: bool = False
    """Print one JSON object at the end instead of streaming text."""


def check_not_given(flags: Flags, names: tuple[str, ...], why: str) -> None:
    """Raise if one of the flags was changed from its default."""
    defaults = {field.name: field.default for field in dataclasses.fields(flags)}
    for name in names:
        if getattr(flags, name) != defaults[name]:
            shown = getattr(flags, name)
            field = f"--{name.replace('_', '-')}"
            raise invalid(field, str(shown) if isinstance(shown, Path) else shown, f"left out: {why}", "leave it out")


def read_sampling(flags: Flags, n: int, top_p: float) -> SamplingSettings:
    from linnet.nn.sampling import sampling_settings

    return sampling_settings(
        n,
        temperature=flags.temperature,
        top_p=top_p if flags.top_p is None else flags.top_p,
        top_k=flags.top_k,
        min_p=flags.min_p,
        repetition_penalty=flags.repetition_penalty,
    )


def needed_prompt(model: Any) -> str:
    """Return the `--prompt` flag for `linnet sample RUN` if the model needs one: without a BOS id the prompt must not be empty."""
    return ' --prompt "The answer"' if getattr(model, "bos_id", 0) is None else ""
