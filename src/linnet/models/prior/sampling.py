"""Sampling an embedding from noise, step by step. Every row has its own solver table.

Letters: B rows, S step capacity, D width, L text tokens, X width of text, n candidates.

A row's result is batch-invariant: products use `batch_invariant` and its noise comes from its own key. `step` is what a server runs
once per tick; `sample` is a scan over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from linnet.core import rng
from linnet.core.errors import UserError
from linnet.core.pytree import pytree, replace
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.network import TextMemory, denoise, read_text
from linnet.models.prior.params import LayerParams, PriorParams
from linnet.models.prior.solver import SolverTable
from linnet.models.prior.tokens import padding_of
from linnet.nn import batch_invariant
from linnet.nn.batch_invariant import COMPILER_OPTIONS
from linnet.nn.norm import l2_normalize

# Otherwise XLA skips roundings to bfloat16 where it can, depending on the number of rows.
OPTIONS = {**COMPILER_OPTIONS, "xla_allow_excess_precision": False}
N_FACTOR = 6
PAGE = 4096


@pytree
class SolverBatch:
    """Solver tables and guidance of each row."""

    times: Int[Array, "B S"]
    factors: Float[Array, "B S 6"]  # as in SolverTable.factors
    n_step: Int[Array, " B"]
    guidance: Float[Array, " B"]


@pytree
class SamplerState:
    x: Float[Array, "B D"]
    start: Float[Array, "B D"]  # previous prediction; initially zeros
    step: Int[Array, " B"]


def stack_solvers(
    solvers: Sequence[SolverTable], guidance: Sequence[float], capacity: int | None = None
) -> SolverBatch:
    """Stack the solver tables of a batch. `capacity`: step capacity, at least the longest table."""
    capacity = max(map(len, solvers)) if capacity is None else capacity
    times = np.zeros((len(solvers), capacity), np.int32)
    factors = np.zeros((len(solvers), capacity, N_FACTOR), np.float32)
    for i, solver in enumerate(solvers):
        times[i, : len(solver)], factors[i, : len(solver)] = solver.times, solver.factors()
    return SolverBatch(
        times=jnp.asarray(times),
        factors=jnp.asarray(factors),
        n_step=jnp.asarray([len(solver) for solver in solvers], jnp.int32),
        guidance=jnp.asarray(guidance, jnp.float32),
    )


def prepare(params: PriorParams, cfg: PriorConfig) -> PriorParams:
    """Return the weights for sampling: one tuple entry per layer, with matrices split for batch-invariant products."""

    def split(path: tuple[Any, ...], leaf: Any) -> Any:
        name = path[-1].name
        return (
            batch_invariant.split_k(_avoid_page_stride(leaf.astype(cfg.dtype)))
            if name.startswith("w") or name == "encoding"
            else leaf
        )

    layers = [jax.tree.map(lambda w, i=i: w[i], params.layers) for i in range(cfg.depth)]
    by_layer = PriorParams(**{**vars(params), "layers": tuple(layers)})
    return jax.tree_util.tree_map_with_path(split, by_layer)


def _avoid_page_stride(matrix: Float[Array, "D E"]) -> Float[Array, "D E2"]:
    """Pad a matrix with zero columns if its rows are a multiple of the page size: their starts would evict each other from the cache,
    which can halve the speed of the product."""
    return (
        matrix
        if matrix.shape[1] * matrix.dtype.itemsize % PAGE
        else jnp.pad(matrix, [(0, 0), (0, batch_invariant.LANES)])
    )


prepared = jax.jit(prepare, static_argnums=1)
"""`prepare` as one compiled program; it consists of many small operations."""


def start(noise: Float[Array, "B D"], cfg: PriorConfig) -> SamplerState:
    x = l2_normalize(noise) * cfg.scale if cfg.normalize_start else noise
    return SamplerState(x=x, start=jnp.zeros_like(x), step=jnp.zeros((len(x),), jnp.int32))


def step(
    params: PriorParams,
    memory: TextMemory,
    null: TextMemory | None,
    state: SamplerState,
    solvers: SolverBatch,
    noise: Float[Array, "B D"],
    cfg: PriorConfig,
) -> SamplerState:
    """Advance every row by one step; finished rows do not change. `null`: KV cache without text, if any row uses guidance."""
    n_row = len(state.x)
    at = jnp.minimum(state.step, solvers.times.shape[1] - 1)
    every = jnp.arange(n_row)
    times, factor = solvers.times[every, at], solvers.factors[every, at]
    known = state.start if cfg.self_cond else None
    output = _guided(params, memory, null, state.x, times, known, solvers.guidance, cfg)
    # Without this XLA fuses the following operations into the matmul, differently for one row and for many.
    output = jax.lax.optimization_barrier(output)
    found = _sum_of(factor[:, :2], state.x, output)
    if cfg.objective != "x_start":
        found = jnp.clip(found, -1.0, 1.0) if cfg.clip_start else found
    elif cfg.normalize_steps:
        found = l2_normalize(found) * cfg.scale
    x = _sum_of(factor[:, 2:], state.x, found, state.start, noise)
    going = (state.step < solvers.n_step)[:, None]
    return SamplerState(
        x=jnp.where(going, x, state.x),
        start=jnp.where(going, found, state.start),
        step=state.step + going[:, 0],
    )


def _sum_of(factors: Float[Array, "B k"], *terms: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """Return the weighted sum of the terms, accumulated in a loop that XLA does not unroll. XLA contracts one of two products in a sum
    to a fused multiply-add, and which one differs between programs: a row would depend on whether its neighbours are guided."""

    def add(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        factor, term = part
        return total + factor[:, None] * term, None

    return jax.lax.scan(add, jnp.zeros_like(terms[0]), (factors.T, jnp.stack(terms)))[0]


def _guided(
    params: PriorParams,
    memory: TextMemory,
    null: TextMemory | None,
    x: Float[Array, "B D"],
    times: Int[Array, " B"],
    known: Float[Array, "B D"] | None,
    guidance: Float[Array, " B"],
    cfg: PriorConfig,
) -> Float[Array, "B D"]:
    """Classifier-free guidance: evaluate with and without conditions in one batch. Guidance 1 is bit-identical to the plain network. A
    single row is duplicated, because XLA fuses a batch of one differently and rounds differently."""
    if null is None and len(x) == 1:
        twice = jax.tree.map(lambda a: jnp.repeat(a, 2, axis=row_axis(a)), memory)
        pair = [None if a is None else jnp.repeat(a, 2, axis=0) for a in (x, times, known)]
        return denoise(params, twice, pair[0], pair[1], None, pair[2], cfg)[:1]  # pyright: ignore[reportArgumentType]
    if null is None:
        return denoise(params, memory, x, times, None, known, cfg)
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, jnp.broadcast_to(b, a.shape)], axis=row_axis(a)), memory, null)
    twice = None if known is None else jnp.concatenate([known, known])
    keep = jnp.arange(2 * len(x)) < len(x)
    output = denoise(params, both, jnp.concatenate([x, x]), jnp.concatenate([times, times]), keep, twice, cfg)
    with_text, without = jnp.split(output, 2)
    mixed = without + (with_text - without) * guidance[:, None]
    return jnp.where(guidance[:, None] == 1.0, with_text, mixed)


def row_axis(leaf: Array) -> int:
    """Return the row axis of a leaf: keys and values have a leading layer axis, other leaves do not."""
    return 1 if leaf.ndim == 4 else 0


def finish(state: SamplerState, cfg: PriorConfig) -> Float[Array, "B D"]:
    """Return the embeddings at their original scale."""
    x = state.x
    if cfg.normalize_final and cfg.objective == "x_start":
        x = l2_normalize(x) * cfg.scale
    return x / cfg.scale


def read(
    params: PriorParams,
    text_embed: Float[Array, "B X"],
    encodings: Float[Array, "B L X"] | None,
    cfg: PriorConfig,
    *,
    n_encodings: Int[Array, " B"] | None = None,
) -> TextMemory:
    """Return the texts' KV cache, batch-invariant for each row: a single row is duplicated, as in `_guided`. `n_encodings`: see
    `read_text`."""
    padding = padding_of(encodings, cfg)
    if len(text_embed) > 1:
        return read_text(params, text_embed, encodings, None, cfg, padding=padding, n_encodings=n_encodings)
    embed, encodings, padding, n_encodings = (
        None if a is None else jnp.repeat(a, 2, axis=0) for a in (text_embed, encodings, padding, n_encodings)
    )
    memory = read_text(params, embed, encodings, None, cfg, padding=padding, n_encodings=n_encodings)  # pyright: ignore[reportArgumentType]
    return jax.tree.map(lambda a: jax.lax.slice_in_dim(a, 0, 1, axis=row_axis(a)), memory)


def null_memory(params: PriorParams, text_embed: Float[Array, "B X"], cfg: PriorConfig) -> TextMemory | None:
    """Return the KV cache of dropped text: one row for all, or one per row if the embedding cannot be dropped. None for models that
    mask text, which use `without_text`."""
    if cfg.masks_text:
        return None
    n_row = 1 if cfg.drop_text_embedding else len(text_embed)
    if cfg.drop_text_embedding:
        return read_text(params, jnp.zeros((1, cfg.d_text), jnp.float32), None, jnp.zeros((1,), bool), cfg)
    embed = jnp.repeat(text_embed, 2, axis=0) if n_row == 1 else text_embed
    memory = read_text(params, embed, None, jnp.zeros((len(embed),), bool), cfg)
    return jax.tree.map(lambda a: jax.lax.slice_in_dim(a, 0, n_row, axis=row_axis(a)), memory)


def without_text(memory: TextMemory) -> TextMemory:
    """Mask everything except the null key; later tokens keep their positions."""
    assert memory.seen is not None, "only a model that masks its text hides it"
    return replace(memory, seen=jnp.zeros_like(memory.seen).at[:, 0].set(True))


def draw_noise(keys: Key[Array, " B"], at: Int[Array, " B"], cfg: PriorConfig) -> Float[Array, "B D"]:
    """Return each row's noise at index `at`: 0 is the initial noise, i + 1 the noise added by step i."""
    return jax.vmap(lambda key, i: jax.random.normal(rng.fold_in(key, i), (cfg.dim,)))(keys, at)


@partial(jax.jit, static_argnames=("cfg", "guided", "n_step", "keep_path"), compiler_options=OPTIONS)
def run(
    params: PriorParams,
    text_embed: Float[Array, "B X"],
    encodings: Float[Array, "B L X"] | None,
    solvers: SolverBatch,
    noise: Key[Array, " B"] | Float[Array, "S1 B D"],
    *,
    cfg: PriorConfig,
    guided: bool,
    n_step: int,
    keep_path: bool = False,
) -> tuple[Float[Array, "B D"], Float[Array, "S B D"] | None]:
    """Run the sampler with prepared weights. `noise`: one key per row, or the noise itself, of which the first is the initial value.
    With `keep_path`, also return the input of every step."""
    memory = read(params, text_embed, encodings, cfg)
    null = (null_memory(params, text_embed, cfg) or without_text(memory)) if guided else None
    drawn = jnp.issubdtype(noise.dtype, jax.dtypes.prng_key)

    def at(i: Array) -> Array:
        if not drawn:
            return noise[jnp.minimum(i, len(noise) - 1)]
        return draw_noise(noise, jnp.full((len(text_embed),), i, jnp.int32), cfg)

    def one(state: SamplerState, i: Array) -> tuple[SamplerState, Array | None]:
        return step(params, memory, null, state, solvers, at(i + 1), cfg), state.x if keep_path else None

    state, path = jax.lax.scan(one, start(at(jnp.int32(0)), cfg), jnp.arange(n_step))
    return finish(state, cfg), path


def sample(
    params: PriorParams,
    text_embed: Float[Array, "B X"],
    encodings: Float[Array, "B L X"] | None,
    solver: SolverTable,
    noise: Key[Array, " B"] | Float[Array, "S1 B D"],
    cfg: PriorConfig,
    *,
    guidance: float = 1.0,
) -> Float[Array, "B D"]:
    """Sample image embeddings for texts, all with one solver table. `params` must come from `prepare`."""
    check_guidance(guidance, cfg)
    assert not isinstance(params.layers, LayerParams), "prepare the weights first"
    guidance, n_row = effective_guidance(guidance, cfg), len(text_embed)
    solvers = stack_solvers([solver] * n_row, [guidance] * n_row)
    return run(params, text_embed, encodings, solvers, noise, cfg=cfg, guided=guidance != 1.0, n_step=len(solver))[0]


def check_guidance(guidance: float, cfg: PriorConfig) -> None:
    if guidance != 1.0 and cfg.can_drop_text and not cfg.can_guide:
        raise UserError(
            f"guidance is {guidance}, but this model was trained without dropping its text and its image "
            f"(p_drop_text {cfg.p_drop_text}, p_drop_image {cfg.p_drop_image}). Fix: use 1, or train with both above 0."
        )


def effective_guidance(guidance: float, cfg: PriorConfig) -> float:
    """Return 1 for a model that cannot drop its text: its prediction is the same without text, so guidance has no effect, as in the
    reference."""
    return guidance if cfg.can_drop_text else 1.0


def guidance_remark(guidance: float, cfg: PriorConfig) -> str | None:
    if effective_guidance(guidance, cfg) == guidance:
        return None
    return (
        f"Guidance {guidance:g} has no effect, so the sample is unguided: in the release of DALLE2-pytorch that this model is of "
        "(0.23.0 to 1.8.4), dropping the text changes nothing."
    )


def best(candidates: Float[Array, "B n D"], text_embed: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """Return each row's candidate with the highest cosine similarity to the text; ties go to the first."""
    likeness = jnp.einsum("bnd,bd->bn", l2_normalize(candidates), l2_normalize(text_embed))
    return jnp.take_along_axis(candidates, jnp.argmax(likeness, axis=1)[:, None, None], axis=1)[:, 0]
