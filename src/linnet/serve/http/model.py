"""What the server needs of a model it serves. The engine is one; the tests' fake is another."""

from __future__ import annotations

from typing import Any, Protocol

from linnet.data.tokenizer import Tokenizer
from linnet.serve.request import OnEvent, Request
from linnet.serve.template import ChatTemplate


class Session(Protocol):
    """A conversation's state, kept by name."""

    @property
    def state(self) -> Any:
        """None: nothing was read yet."""
        ...

    @property
    def n_tokens(self) -> int: ...


class Sessions(Protocol):
    """Every function may be called from any thread, and raises UserError for an id that is not there."""

    def create(self) -> str: ...

    def get(self, id: str) -> Session: ...

    def put(self, id: str, state: Any, n_tokens: int) -> None:
        """The session goes on from here."""
        ...

    def fork(self, id: str) -> str: ...

    def save(self, id: str) -> bytes: ...

    def restore(self, data: bytes) -> str: ...

    def pack(self, state: Any) -> bytes:
        """A state as a file that its client keeps; it counts as no session."""
        ...

    def unpack(self, data: bytes) -> Session: ...

    def delete(self, id: str) -> None: ...


class Model(Protocol):
    """One served model. `submit` and `cancel` may be called from any thread."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def shape(self) -> tuple[int, int, int] | None:
        """Of a picture (height, width, 3), for pixel models."""
        ...

    @property
    def template(self) -> ChatTemplate: ...
    @property
    def family(self) -> str: ...
    @property
    def n_vocab(self) -> int: ...
    @property
    def context(self) -> int | None:
        """Most tokens of one text, the end id that it begins with included; None: any number."""
        ...

    @property
    def state_bytes(self) -> int:
        """Of one slot, however much it has read."""
        ...

    @property
    def created(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def sessions(self) -> Sessions: ...

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """QueueFull, Draining or UserError, before any event."""
        ...

    def cancel(self, id: str) -> None: ...

    def stats(self) -> dict[str, float]: ...
