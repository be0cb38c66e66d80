"""What the server needs of a model it serves: one of tokens, or a prior. Engines are behind some; the tests' fakes are others."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from jaxtyping import Float32
from typing_extensions import TypeIs

from linnet.serve.chat_template import ChatTemplate
from linnet.serve.prior.request import OnSampleEvent, SampleRequest
from linnet.serve.prior.served import Neighbour
from linnet.serve.request import OnEvent, Request
from linnet.tokenizers.base import Tokenizer


class Session(Protocol):
    """A conversation's state, kept by name."""

    @property
    def state(self) -> Any:
        """None: nothing was read yet."""
        ...

    @property
    def n_tokens(self) -> int: ...


class Sessions(Protocol):
    """Every function may be called from any thread, and raises NoSession for an id that is not there."""

    def create(self) -> str: ...

    def n_tokens(self, id: str) -> int:
        """Quick, as `hold` and `release` are: for the event loop, too."""
        ...

    def hold(self, id: str, call: str) -> None:
        """Until `release` nobody else may go on from it (SessionInUse). `call` names who holds it: AnswerLost where an earlier
        attempt of the same call has put its end there already."""
        ...

    def release(self, id: str) -> None:
        """Only by who holds it."""
        ...

    def get(self, id: str) -> Session: ...

    def put(self, id: str, state: Any, n_tokens: int) -> None:
        """The session goes on from here. Only by who holds it."""
        ...

    def fork(self, id: str) -> str: ...

    def save(self, id: str) -> bytes: ...

    def restore(self, data: bytes) -> str: ...

    def pack(self, state: Any) -> bytes:
        """A state as a file that its client keeps; it counts as no session."""
        ...

    def unpack(self, data: bytes) -> Session: ...

    def delete(self, id: str) -> None: ...


class Served(Protocol):
    """One served model of any kind. `cancel` and its `submit` may be called from any thread."""

    @property
    def name(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def state_bytes(self) -> int:
        """Of one slot, however much it has read."""
        ...

    @property
    def created(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...

    def cancel(self, id: str) -> None: ...

    def stats(self) -> dict[str, float]: ...


class Model(Served, Protocol):
    """A model of tokens."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def shape(self) -> tuple[int, int, int] | None:
        """Of a picture (height, width, 3), for pixel models."""
        ...

    @property
    def template(self) -> ChatTemplate: ...
    @property
    def n_vocab(self) -> int: ...
    @property
    def bos_id(self) -> int | None:
        """The id in front of every sequence; None: sequences begin with their own first token."""
        ...

    @property
    def context(self) -> int | None:
        """Most tokens of one text, the begin id included; None: any number."""
        ...

    @property
    def sessions(self) -> Sessions: ...

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """QueueFull, Draining or UserError, before any event."""
        ...


class PriorModel(Served, Protocol):
    """A model that makes an image's embedding from a text's. `encode` and `nearest` take a while: not in the event loop."""

    @property
    def width(self) -> int: ...
    @property
    def text_width(self) -> int: ...
    @property
    def timesteps(self) -> int: ...
    @property
    def can_guide(self) -> bool: ...
    @property
    def most_encodings(self) -> int:
        """Of one text; 0: it takes none."""
        ...

    @property
    def takes_text(self) -> bool:
        """The encoder of its texts is at hand."""
        ...

    @property
    def gallery_rows(self) -> int:
        """Images that `nearest` finds among; 0: there is no gallery."""
        ...

    @property
    def has_pictures(self) -> bool: ...
    def encode(self, text: str) -> tuple[Float32[np.ndarray, " X"], Float32[np.ndarray, "L X"] | None]:
        """The embedding of a text, and its token encodings for a model that takes them."""
        ...

    def nearest(self, embedding: Float32[np.ndarray, " D"], k: int) -> list[Neighbour]: ...

    def submit(self, request: SampleRequest, on_event: OnSampleEvent) -> None:
        """QueueFull, Draining or UserError, before any event."""
        ...


def is_prior(model: Model | PriorModel) -> TypeIs[PriorModel]:
    return model.family == "prior"
