"""Images of a pixel model, in batches that bound the memory.

Letters: n images, E width of an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float32, UInt8

from linnet.generate.samples import sample_images
from linnet.nn.sampling import SamplingSettings
from linnet.runs.load import LoadedRun

BATCH_SIZE = 16
"""Images per batch. Larger batches would not be faster."""


def generate_images(
    run: LoadedRun,
    seen: Sequence[bytes],
    settings: SamplingSettings,
    seeds: Sequence[int],
    embeds: Float32[np.ndarray, "n E"] | None = None,
    guidance: float = 1.0,
) -> UInt8[np.ndarray, "n h w 3"]:
    """Generate one image per seed, each continuing the values in `seen`. `settings` has one row, which is used for all images.
    `embeds` and `guidance`: see `sample_images`."""
    shape = run.vocabulary.shape
    assert shape is not None
    images = []
    for at in range(0, len(seeds), BATCH_SIZE):
        part = slice(at, at + BATCH_SIZE)
        row = np.zeros(len(seeds[part]), np.int32)
        images.append(
            sample_images(
                run.lm,
                run.cfg,
                run.params,
                run.buffers,
                shape,
                seen[part],
                jax.tree.map(lambda x, row=row: x[row], settings),
                seeds[part],
                None if embeds is None else embeds[part],
                guidance,
            )
        )
    return np.concatenate(images)
