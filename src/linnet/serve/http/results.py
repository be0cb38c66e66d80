"""Passes the events of one call's requests from the engine's thread to the event loop, and cancels unfinished requests at its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from anyio import to_thread

from linnet.serve.request import Event, TerminalEvent, TokensEvent

MAX_MERGED = 512
"""Maximum tokens, including top log-probabilities, merged into one event. Serializing thousands would block the event loop for a
second, and is wasted on a client that does not read."""


class HasId(Protocol):
    @property
    def id(self) -> str: ...


R = TypeVar("R", bound=HasId)
R_contra = TypeVar("R_contra", bound=HasId, contravariant=True)
E = TypeVar("E")
E_co = TypeVar("E_co", covariant=True)


class Submits(Protocol[R_contra, E_co]):
    """A model that accepts requests of type R and emits events of type E."""

    def submit(self, request: R_contra, on_event: Callable[[E_co], None]) -> None: ...
    def cancel(self, id: str) -> None: ...


class Bridge:
    """Thread-safe queue of events. The engine never blocks, and wakes the loop once for all events of a tick."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._is_woken = False

    def put(self, receiver: Callable[[E], None], event: E) -> None:
        """Queue an event for a receiver. Thread-safe."""
        self._events.append((receiver, event))
        # If the flag is still set, `_deliver` has yet to run and will see the new event.
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False
        while self._events:
            receiver, event = self._events.popleft()
            receiver(event)


class ResultStream(Generic[R, E]):
    """The requests of one call. Events pending for a slow reader are merged, so that they are bounded by its answers' tokens."""

    def __init__(
        self,
        model: Submits[R, E],
        requests: Sequence[R],
        bridge: Bridge,
        *,
        make_observer: Callable[[], Callable[[E], None]],
        merge: Callable[[Sequence[E]], list[E]],
        is_slow: Callable[[R], bool] = lambda request: False,
    ) -> None:
        """`make_observer`: creates the observer of one request's events. `is_slow`: whether to submit a request in a thread."""
        self._model, self._requests, self._bridge = model, requests, bridge
        self._make_observer, self._merge, self._is_slow = make_observer, merge, is_slow
        self._pending: list[list[E]] = [[] for _ in requests]
        self._has_events = asyncio.Event()
        self._open: set[int] = set()
        """Submitted requests that have not ended."""

    async def submit(self) -> None:
        """Submit all requests. If one fails, cancel the others and raise."""
        try:
            for i, request in enumerate(self._requests):
                await self._submit_one(i, request)
        except BaseException:
            self.close()
            raise

    async def _submit_one(self, i: int, request: R) -> None:
        observe = self._make_observer()

        def receive(event: E) -> None:
            observe(event)
            self._receive(i, event)

        def put(event: E) -> None:
            self._bridge.put(receive, event)

        self._open.add(i)
        try:
            if self._is_slow(request):
                await to_thread.run_sync(self._model.submit, request, put)
            else:
                self._model.submit(request, put)
        except Exception:
            self._open.discard(i)
            raise

    def _receive(self, i: int, event: E) -> None:
        self._pending[i].append(event)
        if isinstance(event, TerminalEvent):
            self._open.discard(i)
        self._has_events.set()

    async def events(self) -> AsyncIterator[tuple[int, E]]:
        """Yield (request index, event) until every request has ended."""
        n_left = len(self._requests)
        while n_left:
            await self._has_events.wait()
            self._has_events.clear()
            for i, pending in enumerate(self._pending):
                self._pending[i] = []
                for event in self._merge(pending):
                    n_left -= isinstance(event, TerminalEvent)
                    yield i, event

    def close(self) -> None:
        """Cancel the requests that have not ended."""
        for i in sorted(self._open):
            self._model.cancel(self._requests[i].id)
        self._open.clear()


def merge(events: Sequence[Event], max_tokens: int | None = None) -> list[Event]:
    """Merge consecutive token events, into events of about `max_tokens` tokens (including top log-probabilities) if given."""
    merged: list[Event] = []
    run: list[TokensEvent] = []
    n_run = 0
    for event in events:
        if isinstance(event, TokensEvent):
            run.append(event)
            n_run += len(event.tokens) + sum(map(len, event.top))
            if max_tokens is None or n_run < max_tokens:
                continue
            merged += _join(run)
        else:
            merged += [*_join(run), event]
        run, n_run = [], 0
    return merged + _join(run)


def _join(run: Sequence[TokensEvent]) -> list[Event]:
    if len(run) < 2:
        return list(run)
    return [
        TokensEvent(
            tokens=tuple(token for one in run for token in one.tokens),
            top=tuple(top for one in run for top in one.top),
            text="".join(one.text for one in run),
            offsets=tuple(offset for one in run for offset in one.offsets),
        )
    ]
