"""A batch of pairs: what a caption became, and what its picture became.

Letters: B rows, L text positions, T width of a text embedding, D width of an image embedding.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Array, Float32

from linnet.core.pytree import pytree


@pytree
class PairBatch:
    text_embed: Float32[Array | np.ndarray, "B T"]
    image_embed: Float32[Array | np.ndarray, "B D"]
    encodings: Float32[Array | np.ndarray, "B L T"] | None
    """A vector for each position of the text; all zeros is padding. None where the source has none."""
    mask: Float32[Array | np.ndarray, " B"]
    """0 for the rows that only fill up the last batch of an evaluation; their vectors are zeros."""
