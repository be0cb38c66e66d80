"""Device side of the engine: slots, the compiled programs that fill and tick them, and each slot's sampling settings.

All scheduling decisions are made elsewhere. Batch-invariant: a slot's tokens depend only on its own request, bit for bit, whatever
runs in other slots and however many ticks a dispatch makes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from linnet.core import rng
from linnet.core.pytree import n_bytes
from linnet.models.base import TokenFamily
from linnet.models.tensor_parallel import mesh_of, on_mesh_of
from linnet.nn.sampling import LogitMask, SamplingSettings, sampling_settings
from linnet.parallel import sharding
from linnet.serve.request import MAX_TOP, Sampling, TokenLogprob

N_TICKS = 16
"""Maximum ticks per dispatch, over which the host's overhead per dispatch is amortized."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotState:
    """Complete state of a request in a slot. Loaded into any slot, the request resumes bit-identically."""

    memory: Any
    token: Any  # the last token, not in `memory` yet
    counts: Any  # [A]: how often each id was generated
    n_read: int
    """Tokens in `memory` when the request was first loaded into a slot: its positions are counted from there."""
    n_in_memory: int
    """Tokens in `memory` now."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dispatch:
    """A dispatch in flight. Reading `tokens` blocks until it is done."""

    n_ticks: int
    """Number of valid rows in the arrays, which may have more."""
    tokens: Int[Array, "n B"]
    logprobs: Float[Array, "n B"]
    top: tuple[Int[Array, "n B K"], Float[Array, "n B K"]] | None
    before: Mapping[int, SlotState]
    """States before the first tick, for the slots in `keep`."""


class Backend:
    def __init__(self, family: TokenFamily, cfg: Any, params: Any, buffers: Any, n_slots: int) -> None:
        self.decoder: Any = on_mesh_of(family.decoder, params)
        mesh = mesh_of(params)
        self._replicated = None if mesh is None else sharding.replicated(mesh)
        if mesh is None:
            # A checkpoint's weights are on a mesh of one device, and states computed from them would be, too.
            params, buffers = jax.device_put((params, buffers), jax.devices()[0])
        self.cfg, self.n_slots = cfg, n_slots
        self._params, self._buffers = self.decoder.cast_weights(params), buffers
        self._prepared = self.decoder.prepare(self._params, buffers, cfg)
        self.chunk_len: int = self.decoder.chunk_len(cfg)
        self._empty_memory = self.to_device(self.decoder.empty_state(cfg))
        self.reset()
        self.state_bytes: int = n_bytes(self._slots) // n_slots

    def reset(self) -> None:
        """Empty all slots: at startup, and after a failure that may have left them in an undefined state."""
        first = self._replicated or jax.devices()[0]
        slots = self.decoder.init_slots(self.cfg, self.n_slots)
        self._slots = slots if self._replicated else jax.device_put(slots, first)
        self._tokens = jax.device_put(np.zeros((self.n_slots,), np.int32), first)
        self._counts = jax.device_put(np.zeros((self.n_slots, self.cfg.n_vocab), np.int32), first)
        self._table = _SamplingTable(self.n_slots, self.cfg.n_vocab, self._replicated)
        self._n_in_memory = [0] * self.n_slots
        """Tokens in each slot's memory."""
        self._earlier: list[Any] = [None] * self.n_slots
        """An earlier state of each slot's request, for families whose states share the parts that no longer change."""

    def warm_up(self) -> None:
        """Compile every program that a request may need, so that the first request does not wait for compilation. (Prompt
        log-probabilities are compiled on first use.)"""
        longest = self.chunk_len if self.cfg.context is None else min(self.chunk_len, self.cfg.context)
        self.prefill_chunk(self.empty_memory(), [self.cfg.end_id] * longest)
        memory = self.prefill_chunk(self.empty_memory(), [self.cfg.end_id])
        state = self.make_state(memory, self.cfg.end_id, 1)
        self.set_sampling(0, state, Sampling(), (), frozenset())
        self.first_token(0, state)
        for with_top in (False, True):
            jax.block_until_ready(self.dispatch(1, [0], with_top=with_top, keep=[0]).tokens)
        after = self.save(0, 1)
        self.memory_after(after, ())
        self.load(0, after)
        self.reset()

    def to_device(self, memory: Any) -> Any:
        """Put a memory on the devices with the sharding that the programs return. With another placement (a memory read from a
        file, for example) the programs would be compiled again, and the first such request would wait for it."""
        return self.decoder.to_device(memory) if self._replicated else jax.device_put(memory, jax.devices()[0])

    # Prefill

    def empty_memory(self) -> Any:
        return self._empty_memory  # memories are immutable, so all requests share one

    def abstract_state(self, n_read: int) -> Any:
        """Return the shapes and dtypes of a memory of `n_read` tokens."""
        return self.decoder.abstract_state(self.cfg, n_read)

    def prefill_chunk(self, memory: Any, tokens: Sequence[int]) -> Any:
        """Prefill at most `chunk_len` tokens, without waiting for the device."""
        return self.decoder.prefill_chunk(self._params, self._buffers, memory, tokens, self.cfg)

    def wait_for(self, memory: Any) -> None:
        """Block until the memory is computed."""
        jax.block_until_ready(memory)

    def chunk_logprobs(
        self, memory: Any, tokens: Sequence[int], targets: Sequence[int], *, with_top: bool
    ) -> tuple[list[float], list[list[TokenLogprob]]]:
        """Return the log-probability of each target and, if `with_top`, the top log-probabilities at its position."""
        size = self.chunk_len
        padded = np.zeros((2, 1, size), np.int32)
        padded[0, 0, : len(tokens)], padded[1, 0, : len(targets)] = tokens, targets
        values, top = self.decoder.chunk_logprobs(
            self._params, self._buffers, memory, padded[0], padded[1], cfg=self.cfg, n_top=self._n_top(with_top)
        )
        n = len(targets)
        rows = [] if top is None else token_logprobs(*(np.asarray(one)[:n] for one in top))
        return np.asarray(values)[:n].tolist(), rows

    def _n_top(self, with_top: bool) -> int:
        """The maximum that a request may ask for, so that one program serves all requests."""
        return min(MAX_TOP, self.cfg.n_vocab) if with_top else 0

    # Slots

    def make_state(self, memory: Any, token: int, n_read: int) -> SlotState:
        counts = np.zeros((self.cfg.n_vocab,), np.int32)
        return SlotState(memory=memory, token=np.int32(token), counts=counts, n_read=n_read, n_in_memory=n_read)

    def load(self, slot: int, state: SlotState) -> None:
        """Load a request's state into the slot."""
        self._slots = self.decoder.insert(self._slots, state.memory, slot)
        self._n_in_memory[slot], self._earlier[slot] = state.n_in_memory, state.memory
        self._tokens, self._counts = _set_row(self._tokens, self._counts, slot, state.token, state.counts)

    def first_token(self, slot: int, state: SlotState) -> Dispatch:
        """Sample a request's first token unbatched, then load the request into the slot: it does not wait for the current dispatch
        of many ticks, nor the other slots for it. The returned dispatch has one column."""
        single = self.decoder.single_slot(state.memory, self.cfg)
        one, counts, tokens, logprobs, top = self._tick_single(single, slot, state.token, state.counts)
        n_in_memory = state.n_in_memory + 1
        memory = self.decoder.extract(self._prepared, one, 0, self.cfg, n_in_memory, state.memory)
        self.load(
            slot, SlotState(memory=memory, token=tokens, counts=counts, n_read=state.n_read, n_in_memory=n_in_memory)
        )
        return Dispatch(n_ticks=1, tokens=tokens, logprobs=logprobs, top=top, before={0: state})

    def set_sampling(
        self, slot: int, state: SlotState, sampling: Sampling, prompt: Sequence[int], min_token_ids: frozenset[int]
    ) -> None:
        """Set the slot's sampling settings from here on."""
        # The position of a sampled token counts the tokens read by then: the first one is at n_read + 1.
        self._table.set(slot, sampling, prompt, min_token_ids, until=state.n_read + 1 + sampling.min_tokens)

    def save(self, slot: int, n_read: int) -> SlotState:
        """Return the state of the slot's request. The slot's own contents are unused from then on."""
        n_in_memory, earlier = self._n_in_memory[slot], self._earlier[slot]
        memory = self.decoder.extract(self._prepared, self._slots, slot, self.cfg, n_in_memory, earlier)
        self._earlier[slot] = memory
        token, counts = _row(self._tokens, self._counts, slot)
        return SlotState(memory=memory, token=token, counts=counts, n_read=n_read, n_in_memory=n_in_memory)

    def mask_next(self, slot: int, allowed: Bool[np.ndarray, " A"]) -> bool:
        """Restrict the next tick to these ids. Returns False if the slot's own bias logit_mask out all of them."""
        return self._table.mask_next(slot, allowed)

    def dispatch(self, n_ticks: int, running: Sequence[int], *, with_top: bool, keep: Sequence[int]) -> Dispatch:
        """Start 1 to `N_TICKS` ticks of the running slots without waiting for them. `keep`: slots whose prior state is returned."""
        before = {slot: self.save(slot, 0) for slot in keep}
        active = np.zeros((self.n_slots,), bool)
        active[list(running)] = True
        settings, logit_mask, keys = self._table.on_device()
        self._slots, self._counts, tokens, logprobs, top = self.decoder.decode(
            self._prepared,
            self._slots,
            self._tokens,
            settings,
            keys,
            self._counts,
            logit_mask,
            active,
            np.int32(n_ticks),
            cfg=self.cfg,
            n_ticks=N_TICKS,
            n_top=self._n_top(with_top),
        )
        self._tokens = _at(tokens, np.int32(n_ticks - 1))
        for slot in running:
            self._n_in_memory[slot] += n_ticks
        return Dispatch(n_ticks=n_ticks, tokens=tokens, logprobs=logprobs, top=top, before=before)

    def memory_after(self, before: SlotState, tokens: Sequence[int]) -> Any:
        """Return the memory after `before` has read its token and then `tokens`. Computed by ticks, so that it is bit-identical to
        the memory in the slot."""
        one = self.decoder.single_slot(before.memory, self.cfg)
        counts = np.zeros((self.cfg.n_vocab,), np.int32)
        for token in (int(before.token), *tokens):
            one, *_ = self._tick_single(one, 0, np.int32(token), counts)  # the sampled token is ignored
        n_in_memory = before.n_in_memory + 1 + len(tokens)
        return self.decoder.extract(self._prepared, one, 0, self.cfg, n_in_memory, before.memory)

    def _tick_single(self, one: Any, slot: int, token: Any, counts: Any) -> Any:
        """Run one tick of a single sequence with a slot's sampling settings."""
        settings, logit_mask, keys = self._table.row(slot)
        return self.decoder.decode(
            self._prepared,
            one,
            np.reshape(token, (1,)),
            settings,
            keys,
            np.reshape(counts, (1, -1)),
            logit_mask,
            cfg=self.cfg,
            n_ticks=1,
            n_top=self._n_top(True),
        )


def token_logprobs(ids: Int[np.ndarray, "n K"], values: Float[np.ndarray, "n K"]) -> list[list[TokenLogprob]]:
    return [list(map(TokenLogprob, *row)) for row in zip(ids.tolist(), values.tolist(), strict=True)]


class _SamplingTable:
    """Sampling settings and logit masks of all slots, kept on the host and sent to the device after a change."""

    def __init__(self, n_slots: int, n_vocab: int, replicated: NamedSharding | None = None) -> None:
        self._replicated = replicated
        """Replicated over the mesh; None without a mesh."""
        self._settings = jax.tree.map(lambda x: np.array(x), sampling_settings(n_slots))
        self._bias = np.zeros((n_slots, n_vocab), np.float32)
        self._min_token_mask = np.zeros((n_slots, n_vocab), bool)
        self._min_token_until = np.zeros((n_slots,), np.int32)
        self._in_prompt = np.zeros((n_slots, n_vocab), bool)
        self._keys = jax.device_put(_keys(n_slots), replicated)
        self._next_mask: dict[int, np.ndarray] = {}
        self._device: tuple[SamplingSettings, LogitMask] | None = None

    def set(
        self, slot: int, sampling: Sampling, prompt: Sequence[int], min_token_ids: frozenset[int], until: int
    ) -> None:
        for name in (field.name for field in dataclasses.fields(self._settings)):
            getattr(self._settings, name)[slot] = getattr(sampling, name)
        bias = self._bias[slot]
        bias[:] = 0.0 if sampling.allowed is None else -np.inf
        if sampling.allowed is not None:
            bias[list(sampling.allowed)] = 0.0
        for token, value in sampling.logit_bias.items():
            bias[token] += value
        bias[list(sampling.banned)] = -np.inf
        self._min_token_mask[slot] = False
        self._min_token_mask[slot, list(min_token_ids)] = True
        self._min_token_until[slot] = until
        self._in_prompt[slot] = False
        if sampling.repetition_penalty != 1.0:
            self._in_prompt[slot, list(set(prompt))] = True
        self._keys = _set_key(self._keys, slot, np.uint32(sampling.seed))
        self._next_mask.pop(slot, None)  # left over from an earlier request that got stuck
        self._device = None

    def mask_next(self, slot: int, allowed: Bool[np.ndarray, " A"]) -> bool:
        self._next_mask[slot] = allowed
        return bool((allowed & (self._bias[slot] > -np.inf)).any())

    def on_device(self) -> tuple[SamplingSettings, LogitMask, Key[Array, " B"]]:
        if self._device is None:
            # Copy first: the device may read the host's memory asynchronously, while the table changes.
            table = (self._settings, self._bias, self._min_token_mask, self._min_token_until, self._in_prompt)
            settings, bias, min_token_mask, min_token_until, in_prompt = jax.device_put(
                jax.tree.map(np.copy, table), self._replicated
            )
            self._device = (
                settings,
                LogitMask(
                    bias=bias, min_token_mask=min_token_mask, min_token_until=min_token_until, in_prompt=in_prompt
                ),
            )
        settings, logit_mask = self._device
        if self._next_mask:
            bias = self._bias.copy()
            for slot, allowed in self._next_mask.items():
                bias[slot, ~allowed] = -np.inf
            self._next_mask = {}
            logit_mask = dataclasses.replace(logit_mask, bias=jax.device_put(bias, self._replicated))
        return settings, logit_mask, self._keys

    def row(self, slot: int) -> tuple[SamplingSettings, LogitMask, Key[Array, " B"]]:
        """Return the settings of one slot, as a batch of one row."""
        return _one_row(self.on_device(), slot)


# Jitted: dispatching each of the dozen operations separately costs the host a millisecond, during which the device is idle.


@partial(jax.jit, static_argnums=0)
def _keys(n_slots: int) -> Key[Array, " B"]:
    return jnp.stack([rng.sample_key(0)] * n_slots)


@jax.jit
def _set_key(keys: Key[Array, " B"], slot: int | Int[Array, ""], seed: UInt32[Array, ""]) -> Key[Array, " B"]:
    return keys.at[slot].set(rng.sample_key(seed))


@jax.jit
def _one_row(table: Any, slot: int | Int[Array, ""]) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1), table)


@jax.jit
def _at(tokens: Int[Array, "n B"], i: Int[Array, ""]) -> Int[Array, " B"]:
    return tokens[i]


@jax.jit
def _row(tokens: Int[Array, " B"], counts: Int[Array, "B A"], slot: int | Int[Array, ""]) -> tuple[Array, Array]:
    return tokens[slot], counts[slot]


@partial(jax.jit, donate_argnums=(1,))
def _set_row(
    tokens: Int[Array, " B"],
    counts: Int[Array, "B A"],
    slot: int | Int[Array, ""],
    token: Array,
    row: Array,
) -> tuple[Array, Array]:
    return tokens.at[slot].set(token.reshape(())), counts.at[slot].set(row.reshape(-1))
