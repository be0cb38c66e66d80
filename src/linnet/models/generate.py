"""Batch generation: streams text for a batch of prompts. Used by `linnet sample` and for samples during training.

A row's text depends only on its prompt, settings and seed, not on other rows or the number of tokens per dispatch.
Memory is constant for any length: only the slots are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from linnet.core import rng
from linnet.core.errors import invalid
from linnet.core.special_tokens import FIRST_BYTE, TextRules
from linnet.models.bos import empty_prompt, in_front
from linnet.models.decoder import DecodeProgram
from linnet.models.detokenize import TextAssembler, check_stops
from linnet.models.tensor_parallel import mesh_of, on_mesh_of, replicate
from linnet.nn.sampling import LogitMask, SamplingSettings
from linnet.parallel import sharding

N_TICKS = 32  # tokens per dispatch

Finish = Literal["end", "stop", "length"]


class BatchDecoder(Protocol):
    """The part of a `Decoder` that generation needs. Classifier-free guidance has no more than this."""

    @property
    def cast_weights(self) -> Callable[[Any], Any]: ...

    @property
    def prepare(self) -> Callable[[Any, Any, Any], Any]: ...

    @property
    def init_slots(self) -> Callable[[Any, int], Any]: ...

    @property
    def insert(self) -> Callable[[Any, Any, Any], Any]: ...

    @property
    def decode(self) -> DecodeProgram: ...

    def prefill(self, params: Any, buffers: Any, prompt: Sequence[int], cfg: Any, state: Any = None, /) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Piece:
    """Output of one dispatch for one row."""

    tokens: list[int]  # as sampled, including EOS
    logprobs: list[float]
    text: str  # complete characters only, without any part of a stop string
    finish: Finish | None  # finish reason, in the row's last piece


def byte_of(token: int) -> bytes:
    """Return the byte of a token; ids 0 to 2 are special tokens without text."""
    return bytes((token - FIRST_BYTE,)) if token >= FIRST_BYTE else b""


BYTES = TextRules(id_bytes=byte_of)


def generate(
    decoder: BatchDecoder,
    params: Any,
    buffers: Any,
    cfg: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    settings: SamplingSettings,
    seeds: Sequence[int],
    stop: Sequence[str] = (),
    ignore_end: bool = False,
    allowed: Sequence[int] | None = None,
    states: Sequence[Any] | None = None,
    n_ticks: int = N_TICKS,
    text_rules: TextRules = BYTES,
    add_special_tokens: bool | None = None,
    shows_prompt: bool = False,
) -> Iterator[list[Piece | None]]:
    """Yield one piece per row after each dispatch, None for rows that finished earlier. Prompts are ids without BOS, which is
    prepended as in training (never if `add_special_tokens` is False). Rows with the same prompt are prefilled once. Only ids in
    `allowed` are sampled. `states`: initial decoder states of the rows, if not empty; rows may share one. `shows_prompt`: the text is
    displayed after the prompt's text, so it is decoded as its continuation."""
    _check(prompts, settings, seeds, stop, max_tokens, n_ticks, cfg.n_vocab)
    front = in_front(cfg.bos_id, add_special_tokens)
    if not front and not all(prompts):
        raise empty_prompt(cfg.bos_id)
    return _stream(
        decoder,
        params,
        buffers,
        cfg,
        [[*front, *prompt] for prompt in prompts],
        len(front),
        [None] * len(prompts) if states is None else states,
        [
            _Row(
                _most(len(prompt), len(front), max_tokens, cfg.context),
                None if ignore_end else cfg.end_id,
                TextAssembler(text_rules, stop, before=prompt if shows_prompt else ()),
            )
            for prompt in prompts
        ],
        settings,
        None if allowed is None else _only(allowed, len(prompts), cfg.n_vocab),
        seeds,
        n_ticks,
    )


def _stream(
    decoder: BatchDecoder,
    params: Any,
    buffers: Any,
    cfg: Any,
    prompts: list[list[int]],
    n_front: int,
    states: Sequence[Any],
    rows: list[_Row],
    settings: SamplingSettings,
    rules: LogitMask | None,
    seeds: Sequence[int],
    n_ticks: int,
) -> Iterator[list[Piece | None]]:
    n_slot = len(rows)
    decoder = on_mesh_of(decoder, params)
    params = decoder.cast_weights(params)
    prepared = decoder.prepare(params, buffers, cfg)
    slots = decoder.init_slots(cfg, n_slot)
    first = np.full((n_slot,), cfg.end_id, np.int32)
    seen = np.zeros((n_slot, cfg.n_vocab), np.int32)
    rows_of: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for i, (prompt, state) in enumerate(zip(prompts, states, strict=True)):
        rows_of.setdefault((id(state), tuple(prompt)), []).append(i)
    for (_, prompt), equal_rows in rows_of.items():
        *read, last = prompt
        one = state = states[equal_rows[0]]
        if read:
            one = decoder.prefill(params, buffers, read, cfg, *([] if state is None else [state]))
        for i in equal_rows:
            slots = slots if one is None else decoder.insert(slots, one, i)
            first[i] = last
            # BOS was not given by the caller, so the repetition penalty does not count it.
            np.add.at(seen[i], np.asarray(prompt[n_front:], np.int32), 1)
    mesh = mesh_of(params)
    keys = replicate(mesh, jnp.stack([rng.sample_key(seed) for seed in seeds]))
    seen, tokens = replicate(mesh, seen), first
    # Host arrays for everything else: each process has the same values, so JAX treats them as one replicated array.
    settings, rules = jax.tree.map(np.asarray, (settings, rules))
    while not all(row.finish for row in rows):
        slots, seen, drawn, logprobs, _ = decoder.decode(
            prepared,
            slots,
            tokens,
            settings,
            keys,
            seen,
            rules,
            np.array([row.finish is None for row in rows]),
            cfg=cfg,
            n_ticks=n_ticks,
        )
        drawn_here, logprobs_here = sharding.to_host((drawn, logprobs))
        tokens = drawn_here[-1]
        yield [
            None if row.finish else row.take(drawn_here[:, i].tolist(), logprobs_here[:, i].tolist())
            for i, row in enumerate(rows)
        ]


def _only(allowed: Sequence[int], n: int, n_vocab: int) -> LogitMask:
    """Mask all other ids from the first token on. `seen`, which the penalties use, already includes the prompt."""
    bias = np.full((n, n_vocab), -np.inf, np.float32)
    bias[:, list(allowed)] = 0.0
    none = jnp.zeros((n, n_vocab), bool)
    return LogitMask(
        bias=jnp.asarray(bias), min_token_mask=none, min_token_until=jnp.zeros((n,), jnp.int32), in_prompt=none
    )


class _Row:
    """Progress of one row: its remaining tokens, text and finish reason."""

    def __init__(self, max_tokens: int, end: int | None, text: TextAssembler) -> None:
        self.left = max_tokens
        self.finish: Finish | None = None
        self._end = end
        self._text = text

    def take(self, tokens: list[int], logprobs: list[float]) -> Piece:
        """Consume sampled tokens up to the end of the row."""
        n = 0
        for token in tokens:
            n += 1
            self.left -= 1
            if token == self._end:
                self.finish = "end"
                break
            self._text.feed(token)
            if self._text.stopped is not None:
                self.finish = "stop"
                break
            if not self.left:
                self.finish = "length"
                break
        text, _ = self._text.take()
        if self.finish:
            text += self._text.close()
        return Piece(tokens=tokens[:n], logprobs=logprobs[:n], text=text, finish=self.finish)


def _most(n_prompt: int, n_front: int, max_tokens: int, context: int | None) -> int:
    """Return the maximum number of new tokens that fit into the context; the last one is never read."""
    if context is None:
        return max_tokens
    room = context - n_front - n_prompt
    if room < 0:
        needs = f"at most {context - n_front}: the model reads {context} tokens, answer included"
        raise invalid("the prompt", f"{n_prompt} tokens", needs, "shorten it")
    return min(max_tokens, room + 1)


def _check(
    prompts: Sequence[Sequence[int]],
    settings: SamplingSettings,
    seeds: Sequence[int],
    stop: Sequence[str],
    max_tokens: int,
    n_ticks: int,
    n_vocab: int,
) -> None:
    if not prompts:
        raise invalid("prompts", 0, "at least one", "give an empty prompt to start from nothing")
    for field, got in (("seeds", len(seeds)), ("settings", settings.temperature.shape[0])):
        if got != len(prompts):
            raise invalid(f"the number of {field}", got, f"one for each of the {len(prompts)} prompts", "give as many")
    if max_tokens < 1:
        raise invalid("max_tokens", max_tokens, "at least 1", "ask for one token or more")
    if n_ticks < 1:
        raise invalid("n_ticks", n_ticks, "at least 1", f"use {N_TICKS}")
    check_stops(stop)
    for prompt in prompts:
        for token in prompt:
            if not 0 <= token < n_vocab:
                raise invalid(
                    "a prompt token", token, f"an id of the model, 0 to {n_vocab - 1}", "use the model's tokenizer"
                )
