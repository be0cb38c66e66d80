"""`Session`: a conversation whose state the model keeps, so that each turn reads only its own text.

A session file is the state that the server's session endpoints save and restore: a conversation can move between a `Run` and a server
with the same weights.
"""

from __future__ import annotations

import os
import queue
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from linnet.api.results import FinishReason, GeneratedText
from linnet.api.text import MAX_TOKENS, TOP_P, to_utf8
from linnet.core.errors import LinnetError, UserError, invalid

if TYPE_CHECKING:
    from linnet.api.text import SessionOptions
    from linnet.serve.engine import Engine
    from linnet.serve.request import Request
    from linnet.serve.state import State
    from linnet.tokenizers.base import Tokenizer


class Session:
    """A conversation with a model. `Run.session` makes one; as a context manager, it frees its state at the end."""

    def __init__(self, owner: object, engine: Engine, tokenizer: Tokenizer, state: State | None = None) -> None:
        self._owner = owner  # the run, which stops the engine when nothing refers to it any more
        self._engine, self._tokenizer, self._state = engine, tokenizer, state
        self._appended: tuple[int, ...] = ()
        """Ids read since the last answer: the repetition penalty counts them as part of the prompt."""
        self._is_open, self._is_streaming = True, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Free the state. The session cannot be used afterwards."""
        self._state, self._is_open = None, False

    @property
    def n_tokens(self) -> int:
        """Tokens of the conversation so far, without the BOS id."""
        self._check()
        return 0 if self._state is None else self._state.n_conversation

    def __repr__(self) -> str:
        return f"Session({self.n_tokens:,} tokens)" if self._is_open else "Session(closed)"

    def append(self, text: str | bytes) -> Self:
        """Read a text without answering it. Appending a text and generating equals generating from the concatenation."""
        self._check()
        ids = self._ids(text)
        if ids:
            self._state = self._engine.append(self._state, ids)
            self._appended += tuple(ids)
        return self

    @overload
    def generate(
        self, prompt: str | bytes = "", *, stream: Literal[False] = False, **options: Unpack[SessionOptions]
    ) -> GeneratedText: ...

    @overload
    def generate(
        self, prompt: str | bytes = "", *, stream: Literal[True], **options: Unpack[SessionOptions]
    ) -> Iterator[GeneratedText]: ...

    def generate(
        self,
        prompt: str | bytes = "",
        *,
        max_tokens: int = MAX_TOKENS,
        temperature: float = 1.0,
        top_p: float = TOP_P,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        stream: bool = False,
    ) -> GeneratedText | Iterator[GeneratedText]:
        """Read a prompt and generate an answer, which becomes part of the conversation.

        Args:
            prompt: Text that continues the conversation.
            max_tokens: Maximum number of new tokens.
            temperature: Sampling temperature. 0: greedy.
            top_p: Nucleus sampling threshold. 1: off.
            top_k: Sample from the k most likely tokens. 0: all.
            min_p: Minimum probability relative to the most likely token.
            repetition_penalty: Divides the logits of tokens that occurred in the prompt or the answer. 1: off.
            seed: Random seed, 0 to 2**32 - 1.
            stop: Stop strings, which are not part of the text (the model has read them).
            ignore_eos: Continue after EOS.
            stream: Return an iterator over pieces of text. The session advances when the iterator ends; if it is closed earlier, the
                session stays as it was.

        Returns:
            The text, without the prompt.
        """
        self._check()
        from linnet.serve.request import Request, Sampling

        sampling = Sampling(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            ignore_eos=ignore_eos,
        )
        request = Request(
            id=uuid.uuid4().hex,
            prompt=tuple(self._ids(prompt)),
            sampling=sampling,
            state=self._state,
            appended=self._appended,
            return_state=True,
        )
        pieces = self._answer(request)
        return pieces if stream else GeneratedText.from_pieces(pieces)

    def fork(self) -> Session:
        """Return an independent session that continues from the same state. It takes no copy and no time."""
        self._check()
        other = Session(self._owner, self._engine, self._tokenizer, self._state)
        other._appended = self._appended
        return other

    def to_bytes(self) -> bytes:
        """Return the state as the bytes of a session file."""
        self._check()
        if self._state is None:
            raise UserError("the session has read nothing yet. Fix: append a text, or generate, before saving it.")
        from linnet.serve.state import to_bytes

        return to_bytes(self._state)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the state to a file, which `Run.session` and the server restore, and return its path.

        Raises:
            UserError: If the session has read nothing yet, or the file cannot be written.
        """
        return write_state(path, self.to_bytes())

    def _check(self) -> None:
        if not self._is_open:
            raise UserError(
                "the session is closed. Fix: use it inside its `with` block, or make another with Run.session()."
            )
        if self._is_streaming:
            raise UserError(
                "the session is generating. Fix: read its stream to the end, close it, or fork the session first."
            )

    def _ids(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(to_utf8(text), continues=self._state is not None).tolist()

    def _answer(self, request: Request) -> Iterator[GeneratedText]:
        from linnet.serve.request import Finished, TokensEvent

        self._check()
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._engine.submit(request, events.put)
        self._is_streaming = True
        finished: Finished | None = None
        last: TokensEvent | None = None
        try:
            while finished is None:
                event = events.get()
                if isinstance(event, Finished):
                    finished = event
                elif isinstance(event, TokensEvent):
                    if last is not None:
                        yield _piece(last, request.sampling.seed)
                    last = event
        finally:
            if finished is None:
                self._engine.cancel(request.id)
            self._is_streaming = False
        if finished.state is None:
            raise LinnetError(f"the generation failed ({finished.reason}): {finished.error or 'no reason was given'}")
        self._state, self._appended = finished.state, ()
        reason: FinishReason = "length" if finished.reason == "length" else _stop_reason(finished.stopped_by)
        if last is not None:
            yield _piece(last, request.sampling.seed, reason)


def read_state(source: str | os.PathLike[str] | bytes) -> bytes:
    """Return the content of a session file."""
    if isinstance(source, bytes):
        return source
    try:
        return Path(source).read_bytes()
    except OSError as error:
        needs = f"a session file that can be read ({error.strerror})"
        raise invalid("source", str(source), needs, "check the path") from None


def write_state(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write a session file and return its path."""
    from linnet.core.files import atomic_write, unwritable

    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, data)
    except OSError as error:
        raise unwritable(path, error) from None
    return path


def _stop_reason(by: str | int | None) -> FinishReason:
    return "stop" if isinstance(by, str) else "end"


def _piece(event: Any, seed: int, reason: FinishReason | None = None) -> GeneratedText:
    return GeneratedText(
        event.text,
        token_ids=[choice.token for choice in event.tokens],
        logprobs=[choice.logprob for choice in event.tokens],
        finish_reason=reason,
        seed=seed,
    )
