"""The decoding capability of a model family: what generation and the serving engine need, as functions over explicit states.

A state holds one sequence, slots hold several. `cfg` is the family's own config; states, slots and prepared weights are pytrees that
only the family looks into.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from linnet.nn.sampling import LogitMask, SamplingSettings


class DecodeProgram(Protocol):
    """A program of several ticks: read `tokens`, then each sampled token."""

    def __call__(
        self,
        prepared: Any,
        slots: Any,
        tokens: Any,
        settings: SamplingSettings,
        keys: Any,
        seen: Any,
        rules: LogitMask | None = None,
        active: Any = None,
        n: Any = None,
        *,
        cfg: Any,
        n_ticks: int,
        n_top: int = 0,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Return the slots, the counts of ids, the tokens, their log-probabilities, and the `n_top` most likely tokens."""
        ...


class ChunkLogprobs(Protocol):
    def __call__(
        self, params: Any, buffers: Any, state: Any, tokens: Any, targets: Any, /, *, cfg: Any, n_top: int = 0
    ) -> tuple[Any, Any]:
        """Return the log-probability of each target given the tokens up to its position, and the `n_top` most likely tokens."""
        ...


def _as_given(params: Any) -> Any:
    return params


def _params_alone(params: Any, buffers: Any, cfg: Any) -> Any:
    del buffers, cfg
    return params


def _nothing(slots: Any, cfg: Any) -> tuple[()]:
    del slots, cfg
    return ()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Decoder:
    init_slots: Callable[[Any, int], Any]
    """`(cfg, n)`: `n` empty slots, with an array `position` of the number of tokens that each has read."""
    empty_state: Callable[[Any], Any]
    """`(cfg)`: the state of an empty sequence."""
    abstract_state: Callable[[Any, int], Any]
    """`(cfg, n_read)`: shapes and dtypes of a state that has read `n_read` tokens."""
    chunk_len: Callable[[Any], int]
    """`(cfg)`: the most tokens that `prefill_chunk` takes."""
    prefill_chunk: Callable[[Any, Any, Any, Sequence[int], Any], Any]
    """`(params, buffers, state, tokens, cfg)`: the state after the tokens."""
    chunk_logprobs: ChunkLogprobs
    insert: Callable[[Any, Any, Any], Any]
    """`(slots, state, i)`: the slots with the sequence in slot `i`; the given slots are donated."""
    single_slot: Callable[[Any, Any], Any]
    """`(state, cfg)`: a single slot with this sequence."""
    extract: Callable[..., Any]
    """`(prepared, slots, i, cfg, n_read, known)`: the state of the sequence in slot `i`, which has read `n_read` tokens. `known`: an
    earlier state of it, or None. Inserting the state again is bit-identical to never having extracted it."""
    decode: DecodeProgram
    cast_weights: Callable[[Any], Any] = _as_given
    """`(params)`: the weights in the dtypes that this decoder reads."""
    prepare: Callable[[Any, Any, Any], Any] = _params_alone
    """`(params, buffers, cfg)`: the weights as `decode` needs them."""
    copies_weights: bool = False
    """Whether `prepare` makes a second copy of the weights."""
    to_device: Callable[[Any], Any] = _as_given
    """`(state)`: a state from elsewhere, sharded over the mesh as the programs return it."""
    sharded_slots: Callable[[Any, Any], Any] = _nothing
    """`(slots, cfg)`: those of the slots' arrays that the mesh's model axis shards."""
    conditioned_state: Callable[[Any, Any, Any], Any] | None = None
    """`(params, embed, cfg)`: the state of an empty sequence conditioned on an embedding; None: not supported."""
    guided: Callable[[float], Any] | None = None
    """`(guidance)`: a decoder with classifier-free guidance of this scale; None: not supported."""

    def prefill(self, params: Any, buffers: Any, prompt: Sequence[int], cfg: Any, state: Any = None) -> Any:
        """Prefill a prompt of any length (after `state`, if given) in chunks of one size, so that one program serves all prompts."""
        state = self.empty_state(cfg) if state is None else state
        size = self.chunk_len(cfg)
        for start in range(0, len(prompt), size):
            state = self.prefill_chunk(params, buffers, state, prompt[start : start + size], cfg)
        return state
