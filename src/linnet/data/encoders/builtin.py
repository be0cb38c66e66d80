"""The built-in text and image encoder: its weights ship with the package, so it works without a download.

Made by `scripts/train_encoders.py --teacher emoji_pairs_256.npz` with its default settings on the emoji's training concepts
(measured on 2026-11-16, see docs/text-to-image.md). Recall over the 386 emoji of held-out concepts: text to image 17.1% at 1 and
50.0% at 10; image to text 14.5% and 47.4%. Chance is 0.3% and 2.6%.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, UInt8

from linnet.core import params as weights
from linnet.core.files import atomic_write
from linnet.core.pytree import leaf_name, named_leaves
from linnet.data.encoders import network
from linnet.data.encoders.encoder import EncodedTexts
from linnet.data.encoders.hashed_ngrams import MAX_WORDS, featurize
from linnet.data.encoders.network import EncoderPair
from linnet.data.images import decode_pixels

WEIGHTS = Path(__file__).parent / "builtin.safetensors"
BLOCK = 64
"""Batch size of the network. The last batch is padded, so that every row is computed by the same program."""


WORDS_BLOCK = 8
"""Batch size for token encodings: encoding a word costs as much as embedding a caption."""


class BuiltinEncoder:
    """The built-in `Encoder`. A row's vector does not depend on the other rows of a call."""

    name = "builtin"
    width = network.WIDTH
    text_len = MAX_WORDS

    def __init__(self, params: EncoderPair) -> None:
        self._params = params

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name, leaf in named_leaves(self._params):
            digest.update(name.encode() + np.asarray(leaf).tobytes())
        return digest.hexdigest()

    def decode(self, encoded: bytes) -> UInt8[np.ndarray, "32 32 3"]:
        return decode_pixels(encoded, network.SIZE)

    def embed_texts(self, texts: Sequence[str]) -> Float32[np.ndarray, "n D"]:
        out = np.empty((len(texts), self.width), np.float32)
        for at in range(0, len(texts), BLOCK):
            block = list(texts[at : at + BLOCK])
            bag = featurize(block + [""] * (BLOCK - len(block)))
            out[at : at + len(block)] = np.asarray(_text(self._params.text, *bag))[: len(block)]
        return out

    def encode_texts(self, texts: Sequence[str]) -> EncodedTexts:
        """Embed texts and encode each of their words, in order."""
        out = np.empty((len(texts), self.text_len, self.width), np.float32)
        for at in range(0, len(texts), WORDS_BLOCK):
            block = list(texts[at : at + WORDS_BLOCK])
            bag = featurize(block + [""] * (WORDS_BLOCK - len(block)))
            out[at : at + len(block)] = np.asarray(_words(self._params.text, *bag))[: len(block)]
        return EncodedTexts(self.embed_texts(texts), out)

    def embed_images(self, pictures: UInt8[np.ndarray, "n 32 32 3"]) -> Float32[np.ndarray, "n D"]:
        out = np.empty((len(pictures), self.width), np.float32)
        for at in range(0, len(pictures), BLOCK):
            block = pictures[at : at + BLOCK]
            full = np.zeros((BLOCK, *block.shape[1:]), np.uint8)
            full[: len(block)] = block
            out[at : at + len(block)] = np.asarray(_image(self._params.image, full))[: len(block)]
        return out


@functools.lru_cache(maxsize=1)
def open_builtin() -> BuiltinEncoder:
    return BuiltinEncoder(load(WEIGHTS))


def save(params: EncoderPair, path: Path) -> None:
    """Save in float16: half the size, without a change in retrieval results."""
    import safetensors.numpy

    leaves = {name: np.asarray(leaf).astype(np.float16) for name, leaf in named_leaves(params)}
    atomic_write(path, safetensors.numpy.save(leaves))


def load(path: Path) -> EncoderPair:
    import safetensors.numpy

    stored = safetensors.numpy.load_file(path)

    def leaf(where: tuple[Any, ...], spec: weights.Spec) -> Any:
        values = stored[leaf_name(where)]
        assert values.shape == spec.shape, f"{leaf_name(where)} of {path} has the shape {values.shape}"
        return jnp.asarray(values, jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, network.specs(), is_leaf=weights.is_spec)


_text, _image = jax.jit(network.encode_text), jax.jit(network.encode_image)
_words = jax.jit(network.encode_words)
