"""Interfaces of the served models (token models and priors), implemented by the engines and by the fakes of the tests."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from jaxtyping import Float32
from typing_extensions import TypeIs

from linnet.serve.chat_template import Template
from linnet.serve.prior.request import OnSampleEvent, SampleRequest
from linnet.serve.prior.served import Neighbor
from linnet.serve.request import OnEvent, Request
from linnet.tokenizers.base import Tokenizer


class StoredSession(Protocol):
    """A stored conversation."""

    @property
    def state(self) -> Any:
        """None: the session has read nothing yet."""
        ...

    @property
    def n_tokens(self) -> int: ...


class SessionStore(Protocol):
    """Session storage. Thread-safe. All methods raise NoSession for an unknown id."""

    def create(self) -> str: ...

    def n_tokens(self, id: str) -> int:
        """Length of the conversation. Like `acquire` and `release`, fast enough for the event loop."""
        ...

    def acquire(self, id: str, call: str) -> None:
        """Lock the session until `release`; raises SessionInUse if it is locked. `call` identifies the call: raises AnswerLost if an
        earlier attempt of the same call has already stored its result."""
        ...

    def release(self, id: str) -> None:
        """Unlock the session. Only for the call that acquired it."""
        ...

    def get(self, id: str) -> StoredSession: ...

    def put(self, id: str, state: Any, n_tokens: int) -> None:
        """Replace the session's state. Only for the call that acquired it."""
        ...

    def fork(self, id: str) -> str: ...

    def save(self, id: str) -> bytes: ...

    def restore(self, data: bytes) -> str: ...

    def pack(self, state: Any) -> bytes:
        """Serialize a state that the client keeps. It does not count as a session."""
        ...

    def unpack(self, data: bytes) -> StoredSession: ...

    def delete(self, id: str) -> None: ...


class Served(Protocol):
    """A served model of any kind. `cancel` and `submit` may be called from any thread."""

    @property
    def name(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def state_bytes(self) -> int:
        """Bytes of one slot, independent of how much it has read."""
        ...

    @property
    def created(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...

    def cancel(self, id: str) -> None: ...

    def stats(self) -> dict[str, float]: ...


class TokenModel(Served, Protocol):
    """A token model."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def shape(self) -> tuple[int, int, int] | None:
        """Image shape (height, width, 3) of a pixel model."""
        ...

    @property
    def template(self) -> Template: ...
    @property
    def n_vocab(self) -> int: ...
    @property
    def bos_id(self) -> int | None:
        """The BOS id before every sequence; None: the model has none."""
        ...

    @property
    def context(self) -> int | None:
        """Maximum tokens of one sequence, including the BOS id; None: unlimited."""
        ...

    @property
    def sessions(self) -> SessionStore: ...

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Queue a request. Raises QueueFull, Draining or UserError before any event is sent."""
        ...


class PriorModel(Served, Protocol):
    """A model that maps a text embedding to an image embedding. `encode` and `nearest` are too slow for the event loop."""

    @property
    def width(self) -> int: ...
    @property
    def text_width(self) -> int: ...
    @property
    def timesteps(self) -> int: ...
    @property
    def can_guide(self) -> bool: ...
    @property
    def max_encodings(self) -> int:
        """Maximum token encodings per text; 0: the model takes none."""
        ...

    @property
    def takes_text(self) -> bool:
        """Whether the text encoder is available."""
        ...

    @property
    def gallery_rows(self) -> int:
        """Number of images that `nearest` searches; 0: there is no gallery."""
        ...

    @property
    def has_images(self) -> bool: ...
    def encode(self, text: str) -> tuple[Float32[np.ndarray, " X"], Float32[np.ndarray, "L X"] | None]:
        """Return the embedding of a text, and its token encodings if the model takes them."""
        ...

    def nearest(self, embedding: Float32[np.ndarray, " D"], k: int) -> list[Neighbor]: ...

    def submit(self, request: SampleRequest, on_event: OnSampleEvent) -> None:
        """Queue a request. Raises QueueFull, Draining or UserError before any event is sent."""
        ...


def is_prior(model: TokenModel | PriorModel) -> TypeIs[PriorModel]:
    return not hasattr(model, "tokenizer")
