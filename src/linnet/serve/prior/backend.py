"""Device side of the prior engine: each slot has an encoded text, a position in its own solver table, and a PRNG key.

All scheduling decisions are made elsewhere. A slot's values depend only on its own request: matmuls are those of `batch_invariant`,
and noise is drawn from its own key. Letters: B slots, S maximum steps, D width, X width of text, L text tokens.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32, Key, UInt32

from linnet.core import rng
from linnet.core.pytree import n_bytes, pytree
from linnet.models.prior import sampling
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.network import TextMemory
from linnet.models.prior.params import PriorParams
from linnet.models.prior.sampling import OPTIONS, SamplerState, SolverBatch, row_axis
from linnet.models.prior.solver import SolverTable
from linnet.serve.prior.request import SampleRequest


@pytree
class PriorSlots:
    """Device state of B requests. One row is the state of one request: loaded into any slot, it resumes bit-identically."""

    memory: TextMemory
    null: TextMemory | None  # unconditional memory, if it differs from row to row
    solver: SolverBatch
    state: SamplerState
    keys: Key[Array, " B"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepDispatch:
    """A step in flight."""

    done: Int[Array, " B"]
    """Wait on this for the step to complete."""
    embeddings: Float[Array, "B D"] | None
    """The current embeddings; `starts` are the predicted clean embeddings. Both are None unless requested."""
    starts: Float[Array, "B D"] | None


class PriorBackend:
    def __init__(self, cfg: PriorConfig, params: PriorParams, n_slots: int) -> None:
        self.cfg, self.n_slots = cfg, n_slots
        self._params = sampling.prepared(params, cfg)
        self._null = _null(self._params, cfg) if cfg.can_guide and not _null_per_row(cfg) else None
        self._empty_row = _make_state(self._params, *_empty_arguments(cfg), cfg=cfg)
        self.reset()
        self.state_bytes: int = n_bytes(self._slots) // n_slots

    def reset(self) -> None:
        """Empty all slots: at startup, and after a failure. A row with 0 steps does not change."""
        self._slots = _repeat_rows(self._empty_row, self.n_slots)

    def warm_up(self) -> None:
        """Compile every program, so that the first request does not wait for compilation."""
        self.load(0, self._empty_row)
        for guided in {False, self.cfg.can_guide}:
            jax.block_until_ready(self.tick(guided=guided, with_embeddings=True).done)
        self.save(0)
        self.reset()

    def make_state(self, request: SampleRequest, table: SolverTable) -> PriorSlots:
        """Encode the text, once for all steps, and draw the initial noise. Does not wait for the device."""
        text, encodings, n_encodings, _, _ = _empty_arguments(self.cfg)
        text[0] = request.text
        if encodings is not None and request.encodings is not None:
            encodings[0, : len(request.encodings)] = request.encodings  # zero rows are padding
            n_encodings[0] = len(request.encodings)
        solver = sampling.stack_solvers([table], [request.guidance], self.cfg.timesteps)
        return _make_state(self._params, text, encodings, n_encodings, solver, np.uint32(request.seed), cfg=self.cfg)

    def load(self, slot: int, state: PriorSlots) -> None:
        self._slots = _load(self._slots, slot, state)

    def save(self, slot: int) -> PriorSlots:
        """Return the state of the slot's request. The slot's own contents are unused from then on."""
        return _save(self._slots, slot)

    def tick(self, *, guided: bool, with_embeddings: bool) -> StepDispatch:
        """Start one step of all slots without waiting for it. `guided`: at least one row uses classifier-free guidance; the other
        rows are bit-identical either way."""
        slots = self._slots
        null = (self._null or slots.null) if guided else None
        state = _step(
            self._params, slots.memory, null, slots.solver, slots.state, slots.keys, cfg=self.cfg, guided=guided
        )
        self._slots = dataclasses.replace(slots, state=state)
        embeddings, starts = _embeddings(state, cfg=self.cfg) if with_embeddings else (None, None)
        return StepDispatch(done=state.step, embeddings=embeddings, starts=starts)


def _null_per_row(cfg: PriorConfig) -> bool:
    """Whether the unconditional memory depends on the request, because it keeps the text embedding or the number of encodings."""
    return cfg.masks_text or not cfg.drop_text_embedding


def _empty_arguments(
    cfg: PriorConfig,
) -> tuple[Float32[np.ndarray, "1 X"], Float32[np.ndarray, "1 L X"] | None, Int32[np.ndarray, " 1"], SolverBatch, Any]:
    """Arguments of an empty slot. Its text is ones, because zeros would become NaN in norms that divide by the maximum."""
    encodings = np.zeros((1, cfg.max_text_len, cfg.d_text), np.float32) if cfg.text_encodings else None
    n_steps = cfg.timesteps
    solver = SolverBatch(
        times=np.zeros((1, n_steps), np.int32),  # pyright: ignore[reportArgumentType]
        factors=np.zeros((1, n_steps, sampling.N_FACTOR), np.float32),  # pyright: ignore[reportArgumentType]
        n_step=np.zeros((1,), np.int32),  # pyright: ignore[reportArgumentType]
        guidance=np.ones((1,), np.float32),  # pyright: ignore[reportArgumentType]
    )
    return np.ones((1, cfg.d_text), np.float32), encodings, np.zeros((1,), np.int32), solver, np.uint32(0)


# All are compiled with the options that make rows batch-invariant.


@partial(jax.jit, static_argnums=1, compiler_options=OPTIONS)
def _null(params: PriorParams, cfg: PriorConfig) -> TextMemory | None:
    return sampling.null_memory(params, jnp.zeros((1, cfg.d_text), jnp.float32), cfg)


@partial(jax.jit, static_argnames="cfg", compiler_options=OPTIONS)
def _make_state(
    params: PriorParams,
    text: Float[Array, "1 X"],
    encodings: Float[Array, "1 L X"] | None,
    n_encodings: Int[Array, " 1"],
    solver: SolverBatch,
    seed: UInt32[Array, ""],
    *,
    cfg: PriorConfig,
) -> PriorSlots:
    key = rng.sample_key(seed)[None]
    noise = sampling.draw_noise(key, jnp.zeros((1,), jnp.int32), cfg)
    lengths_differ = cfg.masks_text and encodings is not None
    memory = sampling.read(params, text, encodings, cfg, n_encodings=n_encodings if lengths_differ else None)
    null = sampling.null_memory(params, text, cfg) if cfg.can_guide and _null_per_row(cfg) else None
    return PriorSlots(memory=memory, null=null, solver=solver, state=sampling.start(noise, cfg), keys=key)


@partial(jax.jit, static_argnames=("cfg", "guided"), compiler_options=OPTIONS)
def _step(
    params: PriorParams,
    memory: TextMemory,
    null: TextMemory | None,
    solver: SolverBatch,
    state: SamplerState,
    keys: Key[Array, " B"],
    *,
    cfg: PriorConfig,
    guided: bool,
) -> SamplerState:
    if guided and null is None:
        null = sampling.without_text(memory)
    noise = sampling.draw_noise(keys, state.step + 1, cfg)
    return sampling.step(params, memory, null, state, solver, noise, cfg)


@partial(jax.jit, static_argnames="cfg", compiler_options=OPTIONS)
def _embeddings(state: SamplerState, *, cfg: PriorConfig) -> tuple[Float[Array, "B D"], Float[Array, "B D"]]:
    return sampling.finish(state, cfg), state.start / cfg.scale


@partial(jax.jit, static_argnums=1)
def _repeat_rows(state: PriorSlots, n_slots: int) -> PriorSlots:
    return jax.tree.map(lambda x: jnp.repeat(x, n_slots, axis=row_axis(x)), state)


@jax.jit
def _load(slots: PriorSlots, slot: int | Int[Array, ""], state: PriorSlots) -> PriorSlots:
    def one(all_rows: Array, row: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(all_rows, row, slot, row_axis(all_rows))

    return jax.tree.map(one, slots, state)


@jax.jit
def _save(slots: PriorSlots, slot: int | Int[Array, ""]) -> PriorSlots:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1, row_axis(x)), slots)
