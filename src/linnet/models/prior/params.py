"""Parameters of a `prior` model: each is declared once, with layers stacked on a leading axis.

Letters: Y layers, D width, H heads, K width of a head, F hidden width, L text tokens, X width of text, T steps, N tokens
of a kind.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from linnet.core.params import Init, Spec
from linnet.core.pytree import pytree, tree_of
from linnet.core.quant import Weight
from linnet.models.prior.config import PriorConfig
from linnet.nn.batch_invariant import SplitK
from linnet.parallel.sharding import ROWS, LogicalAxisRules

RULES: LogicalAxisRules = {**ROWS, "model": "fsdp", "heads": "model", "hidden": "model"}
"""Sharding rules of the model."""

N_BUCKET = 32


@pytree
class Affine:
    w: Weight | SplitK
    b: Float[Array, " O"]


@pytree
class TimeNetwork:
    first: Affine  # D -> 2 N D
    second: Affine  # 2 N D -> 2 N D
    out: Affine  # 2 N D -> N D


@pytree
class LayerParams:
    attention_gain: Float[Array, "*Y D"]
    null_kv: Float[Array, "*Y 2 K"]
    w_q: Weight | SplitK  # Y D HK
    w_kv: Weight | SplitK  # Y D 2K
    w_out: Weight | SplitK  # Y HK D
    out_gain: Float[Array, "*Y D"]
    ff_gain: Float[Array, "*Y D"]
    w_in: Weight | SplitK  # Y D 2F
    mid_gain: Float[Array, "*Y F"] | None  # with normformer
    w_back: Weight | SplitK  # Y F D


@pytree
class PriorParams:
    query: Float[Array, " D"]
    null_encodings: Float[Array, "L D"] | None  # unless the text is masked
    null_text: Float[Array, "N D"] | None  # with null vectors
    null_image: Float[Array, "1 D"] | None  # with null vectors
    time: Float[Array, "T ND"] | TimeNetwork  # a table of the timesteps, or a network of continuous time
    text_tokens: Affine | None  # X -> N D, with several tokens or different widths
    encoding: Weight | SplitK | None  # X D, with different widths
    image_tokens: Affine | None  # D -> N D, with several tokens
    bias: Float[Array, "32 H"]  # by distance
    in_gain: Float[Array, " D"] | None  # with norm_in
    layers: LayerParams | tuple[LayerParams, ...]  # stacked; after `prepare`, one per layer
    out_gain: Float[Array, " D"] | None  # with norm_out
    w_proj: Weight | SplitK | None  # D D, with final_proj


def param_specs(cfg: PriorConfig) -> PriorParams:
    """Return the specs of all parameters. Initializers match the reference, which uses torch's defaults: matrices and biases uniform
    by fan-in, tables and learned vectors standard normal, gains one."""
    n, d, k, f = cfg.depth, cfg.dim, cfg.d_head, cfg.dim * cfg.ff_mult
    hk = cfg.n_head * k

    def layer(shape: tuple[int, ...], axes: tuple[str | None, ...], init: Init = "uniform") -> Spec:
        return Spec((n, *shape), ("layers", *axes), init, min_dtype="int8" if init == "uniform" else "float32")

    def affine(n_in: int, n_out: int) -> Affine:
        bias = Spec((n_out,), ("hidden",), "uniform", n_in=n_in)
        return tree_of(Affine, w=Spec((n_in, n_out), ("model", "hidden"), "uniform"), b=bias)

    def gain(there: bool = True) -> Spec | None:
        return Spec((d,), ("model",), "ones") if there else None

    wide = d * cfg.n_time_token
    network = TimeNetwork(first=affine(d, 2 * wide), second=affine(2 * wide, 2 * wide), out=affine(2 * wide, wide))
    narrow = cfg.d_text != d
    replaced = cfg.text_conditioning == "null_vectors"
    return tree_of(
        PriorParams,
        query=Spec((d,), ("model",), "normal"),
        null_encodings=Spec((cfg.max_text_len, d), (None, "model"), "normal") if not cfg.masks_text else None,
        null_text=Spec((cfg.n_text_token, d), (None, "model"), "normal") if replaced else None,
        null_image=Spec((1, d), (None, "model"), "normal") if replaced else None,
        time=network if cfg.continuous_time else Spec((cfg.timesteps, wide), (None, "model"), "normal"),
        text_tokens=affine(cfg.d_text, cfg.n_text_token * d) if narrow or cfg.n_text_token > 1 else None,
        encoding=Spec((cfg.d_text, d), (None, "model"), "uniform") if narrow and cfg.text_encodings else None,
        image_tokens=affine(d, cfg.n_image_token * d) if cfg.n_image_token > 1 else None,
        bias=Spec((N_BUCKET, cfg.n_head), (None, "heads"), "normal"),
        in_gain=gain(cfg.norm_in),
        layers=tree_of(
            LayerParams,
            attention_gain=layer((d,), ("model",), "ones"),
            null_kv=layer((2, k), (None, None), "normal"),
            w_q=layer((d, hk), ("model", "heads")),
            w_kv=layer((d, 2 * k), ("model", None)),
            w_out=layer((hk, d), ("heads", "model")),
            out_gain=layer((d,), ("model",), "ones"),
            ff_gain=layer((d,), ("model",), "ones"),
            w_in=layer((d, 2 * f), ("model", "hidden")),
            mid_gain=layer((f,), ("hidden",), "ones") if cfg.normformer else None,
            w_back=layer((f, d), ("hidden", "model")),
        ),
        out_gain=gain(cfg.norm_out),
        w_proj=Spec((d, d), ("model", None), "uniform") if cfg.final_proj else None,
    )
