"""From the engine's thread to the event loop: events of one call's requests in order, and a cancel for whatever is left at its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from anyio import to_thread

from linnet.serve.request import Event, TerminalEvent, TokensEvent

MAX_TOGETHER = 512
"""Tokens and their likeliest that are told a reader in one piece. To write thousands takes a second that all others wait, and a
reader who does not read needs no more of them written."""


class Asked(Protocol):
    @property
    def id(self) -> str: ...


R = TypeVar("R", bound=Asked)
R_contra = TypeVar("R_contra", bound=Asked, contravariant=True)
E = TypeVar("E")
E_co = TypeVar("E_co", covariant=True)


class Submits(Protocol[R_contra, E_co]):
    """A model that takes requests of one kind and tells events of another."""

    def submit(self, request: R_contra, on_event: Callable[[E_co], None]) -> None: ...
    def cancel(self, id: str) -> None: ...


class Bridge:
    """Hands events over. The engine never waits, and wakes the loop once for all the events of a tick."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._is_woken = False

    def put(self, receiver: Callable[[E], None], event: E) -> None:
        """From any thread."""
        self._events.append((receiver, event))
        # If the flag is still up, the loop has yet to look, and will see what was just added.
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False
        while self._events:
            receiver, event = self._events.popleft()
            receiver(event)


class ResultStream(Generic[R, E]):
    """The requests of one call. What waits for a slow reader is merged when it reads, and is never more than its answers' tokens."""

    def __init__(
        self,
        model: Submits[R, E],
        requests: Sequence[R],
        bridge: Bridge,
        *,
        watch: Callable[[], Callable[[E], None]],
        merge: Callable[[Sequence[E]], list[E]],
        takes_long: Callable[[R], bool] = lambda request: False,
    ) -> None:
        """`watch`: makes what sees the events of one request. `takes_long`: to submit it; then the loop must not wait for it."""
        self._model, self._requests, self._bridge = model, requests, bridge
        self._watch, self._merge, self._takes_long = watch, merge, takes_long
        self._waiting: list[list[E]] = [[] for _ in requests]
        self._news = asyncio.Event()
        self._open: set[int] = set()
        """Those submitted whose end did not arrive yet."""

    async def submit(self) -> None:
        """All of them, or none and the reason."""
        try:
            for i, request in enumerate(self._requests):
                await self._submit_one(i, request)
        except BaseException:
            self.close()
            raise

    async def _submit_one(self, i: int, request: R) -> None:
        see = self._watch()

        def receive(event: E) -> None:
            see(event)
            self._receive(i, event)

        def put(event: E) -> None:
            self._bridge.put(receive, event)

        self._open.add(i)
        try:
            if self._takes_long(request):
                await to_thread.run_sync(self._model.submit, request, put)
            else:
                self._model.submit(request, put)
        except Exception:
            self._open.discard(i)
            raise

    def _receive(self, i: int, event: E) -> None:
        self._waiting[i].append(event)
        if isinstance(event, TerminalEvent):
            self._open.discard(i)
        self._news.set()

    async def events(self) -> AsyncIterator[tuple[int, E]]:
        """Until every request has ended."""
        n_left = len(self._requests)
        while n_left:
            await self._news.wait()
            self._news.clear()
            for i, waiting in enumerate(self._waiting):
                self._waiting[i] = []
                for event in self._merge(waiting):
                    n_left -= isinstance(event, TerminalEvent)
                    yield i, event

    def close(self) -> None:
        """Nobody wants the rest."""
        for i in sorted(self._open):
            self._model.cancel(self._requests[i].id)
        self._open.clear()


def merge(events: Sequence[Event], most: int | None = None) -> list[Event]:
    """The same events, with tokens that follow each other in one, or in several of about so many (their likeliest counted) at most."""
    merged: list[Event] = []
    run: list[TokensEvent] = []
    n_run = 0
    for event in events:
        if isinstance(event, TokensEvent):
            run.append(event)
            n_run += len(event.tokens) + sum(map(len, event.top))
            if most is None or n_run < most:
                continue
            merged += _joined(run)
        else:
            merged += [*_joined(run), event]
        run, n_run = [], 0
    return merged + _joined(run)


def _joined(run: Sequence[TokensEvent]) -> list[Event]:
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
