"""The two networks of the built-in encoder: pure functions from words and from pixels to unit vectors of one space.

Letters: B rows, V different words, F features of a word, W words of a caption, E width of a word, H attention pools, D width of an
embedding, h w pixels, C channels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from linnet.core.params import Spec
from linnet.core.pytree import pytree, tree_of
from linnet.data.encoders.hashed_ngrams import N_BUCKETS

SIZE = 32
"""Image height and width in pixels."""
WIDTH = 256
WORD, POOLS, TEXT_HIDDEN = 64, 4, 512
STEM, MIDDLE, TOP, IMAGE_HIDDEN = 32, 64, 160, 384
EPS = 1e-6


@pytree
class TextEncoder:
    table: Float[Array, "N E"]
    parts: Float[Array, "2 E"]
    pool: Float[Array, "E H"]
    up: Float[Array, "HE M"]
    down: Float[Array, "M D"]


@pytree
class ImageEncoder:
    stem: Float[Array, "3 3 12 C"]
    stem_bias: Float[Array, " C"]
    middle: Float[Array, "4C C2"]
    middle_block: Float[Array, "3 3 C2 C2"]
    top: Float[Array, "4C2 C3"]
    top_block: Float[Array, "3 3 C3 C3"]
    up: Float[Array, "P M"]
    up_bias: Float[Array, " M"]
    down: Float[Array, "M D"]


@pytree
class EncoderPair:
    text: TextEncoder
    image: ImageEncoder


def specs() -> EncoderPair:
    def conv(n_in: int, n_out: int) -> Spec:
        return Spec((3, 3, n_in, n_out), (None,) * 4)

    def matrix(n_in: int, n_out: int) -> Spec:
        return Spec((n_in, n_out), (None, None))

    def zeros(*shape: int) -> Spec:
        return Spec(shape, (None,) * len(shape), init="zeros")

    text = tree_of(
        TextEncoder,
        table=Spec((N_BUCKETS, WORD), (None, None), init="fan_out"),
        parts=zeros(2, WORD),
        pool=zeros(WORD, POOLS),
        up=matrix(POOLS * WORD, TEXT_HIDDEN),
        down=matrix(TEXT_HIDDEN, WIDTH),
    )
    image = tree_of(
        ImageEncoder,
        stem=conv(12, STEM),
        stem_bias=zeros(STEM),
        middle=matrix(4 * STEM, MIDDLE),
        middle_block=conv(MIDDLE, MIDDLE),
        top=matrix(4 * MIDDLE, TOP),
        top_block=conv(TOP, TOP),
        up=matrix(3 * TOP, IMAGE_HIDDEN),
        up_bias=zeros(IMAGE_HIDDEN),
        down=matrix(IMAGE_HIDDEN, WIDTH),
    )
    return EncoderPair(text=text, image=image)


def encode_text(
    params: TextEncoder, features: Int[Array, "V F"], words: Int[Array, "B W"], parts: Int[Array, "B W"]
) -> Float[Array, "B D"]:
    """Embed captions. A word is the scaled sum of its features; a caption is pooled from its words by H learned attention pools."""
    x = _word_vectors(params, features, words, parts)
    scores = jnp.where((words > 0)[..., None], x @ params.pool, -1e9)
    pooled = jnp.einsum("bwh,bwe->bhe", jax.nn.softmax(scores, axis=1), x)
    # Without words, all pools of a caption are equal and independent of the other captions of the batch.
    return _text_head(params, pooled.reshape(len(words), -1))


def encode_words(
    params: TextEncoder, features: Int[Array, "V F"], words: Int[Array, "B W"], parts: Int[Array, "B W"]
) -> Float[Array, "B W D"]:
    """Encode each word as the embedding of a caption that consists of this word only. Padding is all zeros.

    Words are not mixed before pooling, so a word's own vector is all the information about it; the head maps it into the embedding
    space. Compared with the caption embedding, the encodings add which words there are and their order.
    """
    x = _word_vectors(params, features, words, parts)
    # With one word, every pool equals that word.
    encoded = _text_head(params, jnp.tile(x, (1, 1, POOLS)))
    return jnp.where((words > 0)[..., None], encoded, 0)


def _word_vectors(
    params: TextEncoder, features: Int[Array, "V F"], words: Int[Array, "B W"], parts: Int[Array, "B W"]
) -> Float[Array, "B W E"]:
    is_feature = (features > 0)[..., None]
    vectors = (params.table[features] * is_feature).sum(1) / jnp.sqrt(jnp.maximum(is_feature.sum(1), 1))
    return norm(vectors[words] + params.parts[parts])


def _text_head(params: TextEncoder, pooled: Float[Array, "*B HE"]) -> Float[Array, "*B D"]:
    return l2_normalize(jax.nn.gelu(pooled @ params.up) @ params.down)


def encode_image(
    params: ImageEncoder, pixels: UInt8[Array, "B h w 3"] | Float[Array, "B h w 3"]
) -> Float[Array, "B D"]:
    """Embed images with values 0 to 255. Three scales of 16, 8 and 4 pixels per side; pools mean, maximum and centre."""
    x = _space_to_depth(pixels.astype(jnp.float32) / 127.5 - 1)
    x = jax.nn.gelu(_conv(x, params.stem) + params.stem_bias)
    x = _space_to_depth(x) @ params.middle
    x = x + _conv(jax.nn.gelu(norm(x)), params.middle_block)
    x = _space_to_depth(jax.nn.gelu(norm(x))) @ params.top
    x = x + _conv(jax.nn.gelu(norm(x)), params.top_block)
    x = jax.nn.gelu(norm(x))
    pooled = jnp.concatenate([x.mean((1, 2)), x.max((1, 2)), x[:, 1:3, 1:3].mean((1, 2))], axis=-1)
    hidden = jax.nn.gelu(norm(pooled) @ params.up + params.up_bias)
    return l2_normalize(hidden @ params.down)


def norm(x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPS)


def l2_normalize(x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + EPS)


def _space_to_depth(x: Float[Array, "B h w C"]) -> Float[Array, "B h//2 w//2 4*C"]:
    """Halve height and width by stacking 2 x 2 pixels; a linear layer after it is a convolution of stride two."""
    b, h, w, c = x.shape
    return x.reshape(b, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 2, 4, 5).reshape(b, h // 2, w // 2, 4 * c)


def _conv(x: Float[Array, "B h w C"], kernel: Float[Array, "3 3 C E"]) -> Float[Array, "B h w E"]:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
