"""The built-in text and image encoder: its weights ship with the package, so it works without a download.

Made by `scripts/train_encoders.py --teacher emoji_pairs_256.npz` with its default settings on the emoji's training concepts
(measured on 2026-11-16, see docs/text-to-image.md). Recall over the 386 emoji of held-out concepts: text to image 17.1% at 1 and
50.0% at 10; image to text 14.5% and 47.4%. Chance is 0.3% and 2.6%.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
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
        return _run_blocks(
            lambda block: _text(self._params.text, *featurize(block)), list(texts), "", BLOCK, (self.width,)
        )

    def encode_texts(self, texts: Sequence[str]) -> EncodedTexts:
        """Embed texts and encode each of their words, in order."""
        shape = (self.text_len, self.width)
        encodings = _run_blocks(
            lambda block: _words(self._params.text, *featurize(block)), list(texts), "", WORDS_BLOCK, shape
        )
        return EncodedTexts(self.embed_texts(texts), encodings)

    def embed_images(self, images: UInt8[np.ndarray, "n 32 32 3"]) -> Float32[np.ndarray, "n D"]:
        blank = np.zeros(images.shape[1:], np.uint8)
        return _run_blocks(
            lambda block: _image(self._params.image, np.stack(block)), list(images), blank, BLOCK, (self.width,)
        )


def _run_blocks(
    run: Callable[[list[Any]], Any], rows: list[Any], padding: Any, block: int, shape: tuple[int, ...]
) -> Float32[np.ndarray, "n ..."]:
    """Run a program on blocks of rows, the last one padded, and return the outputs of the rows."""
    out = np.empty((len(rows), *shape), np.float32)
    for at in range(0, len(rows), block):
        part = rows[at : at + block]
        out[at : at + len(part)] = np.asarray(run(part + [padding] * (block - len(part))))[: len(part)]
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

    arrays = safetensors.numpy.load_file(path)

    def leaf(key_path: tuple[Any, ...], spec: weights.Spec) -> Any:
        values = arrays[leaf_name(key_path)]
        assert values.shape == spec.shape, f"{leaf_name(key_path)} of {path} has the shape {values.shape}"
        return jnp.asarray(values, jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, network.specs(), is_leaf=weights.is_spec)


_text, _image = jax.jit(network.encode_text), jax.jit(network.encode_image)
_words = jax.jit(network.encode_words)
