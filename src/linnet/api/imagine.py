"""`linnet.imagine`: images from a text, by a prior and a conditional image model."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from linnet.api.images import Images, Neighbor
from linnet.api.load import load
from linnet.api.run import Run
from linnet.core.errors import invalid

N_NEAREST = 3
DEFAULT_GUIDANCE = 1.5
"""It gave the most faithful images (docs/text-to-image.md), but needs a painter that was also trained without embeddings."""
MAX_GUIDANCE = 100.0


def check_settings(text: str, n: int, seed: int, guidance: float | None, prior_guidance: float) -> None:
    """Validate the settings before any run is opened."""
    if not text.strip():
        raise invalid("text", text, "some words", 'write them, as in "red heart"')
    if n < 1:
        raise invalid("n", n, "at least 1", "use 4")
    if not 0 <= seed < 2**32:
        raise invalid("seed", seed, "between 0 and 2**32 - 1", "use 0")
    for name, value in (("guidance", guidance), ("prior_guidance", prior_guidance)):
        if value is not None and not 0 <= value <= MAX_GUIDANCE:
            raise invalid(name, value, f"between 0 and {MAX_GUIDANCE:g}", "use 1, which is none")


def imagine(
    text: str,
    *,
    prior: Run | str | os.PathLike[str] = "runs/prior-emoji",
    painter: Run | str | os.PathLike[str] = "runs/emoji-imagine",
    n: int = 4,
    seed: int = 0,
    steps: int | None = None,
    prior_guidance: float = 1.0,
    guidance: float | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    checkpoint: str | int = "best",
) -> Images:
    """Generate images of a text: the prior samples an image embedding, and the painter generates an image from it.

    Args:
        text: What the images show.
        prior: A prior, or the folder of one. Load it once to imagine several texts.
        painter: An image model that was trained with `data.condition`, or its folder.
        n: Number of images. The first does not depend on it.
        seed: Random seed. Image i uses seed + i.
        steps: Sampling steps of the prior. Default: 64.
        prior_guidance: Classifier-free guidance scale of the prior. 1: none.
        guidance: Classifier-free guidance scale of the painter, at twice the cost. Default: 1.5 if the painter supports it.
        temperature: Sampling temperature of the painter. 0: greedy.
        top_p: Nucleus sampling threshold of the painter.
        checkpoint: Checkpoint of both runs, if they are given as folders.

    Returns:
        The images, with the captions of the nearest images of the prior's data.
    """
    check_settings(text, n, seed, guidance, prior_guidance)
    from linnet.generate.text_to_image import check_exist, join_runs
    from linnet.models.prior.sampling import guidance_remark
    from linnet.nn.sampling import sampling_settings

    settings = sampling_settings(1, temperature=temperature, top_p=top_p)
    check_exist(
        **{name: Path(one) for name, one in (("prior", prior), ("painter", painter)) if not isinstance(one, Run)}
    )
    first = prior if isinstance(prior, Run) else load(prior, checkpoint=checkpoint)
    second = painter if isinstance(painter, Run) else load(painter, checkpoint=checkpoint)
    both = join_runs(first.loaded, second.loaded)
    if (remark := guidance_remark(prior_guidance, both.prior.cfg.prior)) is not None:
        warnings.warn(remark, stacklevel=2)
    if guidance is None:
        guidance = DEFAULT_GUIDANCE if both.painter.cfg.lm.can_guide else 1.0
    seeds = [(seed + i) % 2**32 for i in range(n)]
    embeds = both.embeds(text, seeds, steps=steps, guidance=prior_guidance)
    found = both.nearest(embeds, N_NEAREST)
    nearest = () if found is None else tuple(tuple(Neighbor(*near) for near in row) for row in found)
    pixels = both.paint(embeds, settings, seeds, guidance=guidance)
    return Images(pixels=pixels, seeds=tuple(seeds), nearest=nearest)
