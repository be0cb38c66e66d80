"""In-memory sessions: conversation states by id, bounded in number and bytes, that can be saved to and restored from bytes."""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable
from typing import Any

from linnet.core.errors import UserError
from linnet.serve import state as states
from linnet.serve.request import NoSession, SessionInUse
from linnet.serve.state import State, UniqueBytes

MAX_SESSIONS = 1024
MAX_BYTES = 4 << 30


@dataclasses.dataclass(frozen=True)
class Session:
    state: State | None
    """None: the session has read nothing yet."""
    n_tokens: int
    """Length of the conversation, without its BOS id."""


def new_id() -> str:
    return f"session-{secrets.token_urlsafe(16)}"


def empty_session(id: str) -> UserError:
    return UserError(f"session {id[:64]!r} is empty. Fix: use it in a call before saving it.")


class SessionLimits:
    """What the session stores of a model have in common: the limits, and the format of a serialized state."""

    def __init__(
        self,
        abstract_state: Callable[[int], Any],
        model: str,
        *,
        max_sessions: int = MAX_SESSIONS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`abstract_state(n)` gives the shapes of the model's memory of `n` tokens; `model` is its fingerprint."""
        self._abstract_state, self._model = abstract_state, model
        self._max_sessions, self._max_bytes = max_sessions, max_bytes

    def pack(self, state: State) -> bytes:
        """Serialize a state that the client keeps. It does not count towards the limits."""
        return states.to_bytes(state)

    def unpack(self, data: bytes) -> Session:
        """Deserialize and validate the output of `pack` or `save`."""
        state = states.from_bytes(data, self._abstract_state, self._model)
        return Session(state, state.n_conversation)

    def _check_capacity(self, n_sessions: int, n_bytes: int) -> None:
        """Raise an error if another session would exceed the limits."""
        if n_sessions >= self._max_sessions:
            raise UserError(
                f"the maximum number of sessions ({self._max_sessions}) is reached. Fix: delete a session first."
            )
        if n_bytes >= self._max_bytes:
            usage = f"{n_bytes >> 20:,} MB of {self._max_bytes >> 20:,}"
            raise UserError(
                f"the memory for session states is full ({usage}). Fix: delete a session first, or raise --sessions-mb."
            )


class MemorySessions(SessionLimits):
    """The sessions of one model. Thread-safe. Sessions are never evicted: at the limit, creating one is an error, while existing
    ones can always continue."""

    def __init__(self, abstract_state: Callable[[int], Any], model: str, **limits: int) -> None:
        super().__init__(abstract_state, model, **limits)
        self._sessions: dict[str, Session] = {}
        self._usage = UniqueBytes()
        self._in_use: set[str] = set()
        self._lock = threading.Lock()

    def create(self) -> str:
        return self._add(Session(None, 0))

    def get(self, id: str) -> Session:
        with self._lock:
            if id not in self._sessions:
                raise NoSession(id)
            return self._sessions[id]

    def n_tokens(self, id: str) -> int:
        return self.get(id).n_tokens

    def acquire(self, id: str, call: str) -> None:
        self.get(id)
        with self._lock:
            if id in self._in_use:
                raise SessionInUse(id)
            self._in_use.add(id)

    def release(self, id: str) -> None:
        with self._lock:
            self._in_use.remove(id)

    def put(self, id: str, state: State, n_tokens: int) -> None:
        """Replace the session's state. A session that was deleted in the meantime stays deleted."""
        with self._lock:
            if id in self._sessions:
                self._usage.add(state.memory)  # first, so that arrays shared with the old state stay counted
                self._uncount(self._sessions[id])
                self._sessions[id] = Session(state, n_tokens)

    def fork(self, id: str) -> str:
        """Copy a session. States are immutable, so the two can share one."""
        return self._add(self.get(id))

    def save(self, id: str) -> bytes:
        session = self.get(id)
        if session.state is None:
            raise empty_session(id)
        return states.to_bytes(session.state)

    def restore(self, data: bytes) -> str:
        return self._add(self.unpack(data))

    def delete(self, id: str) -> None:
        self.get(id)
        with self._lock:
            if (session := self._sessions.pop(id, None)) is not None:
                self._uncount(session)

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def n_bytes(self) -> int:
        """Bytes of all states; arrays shared by several count once."""
        return self._usage.total

    def _add(self, session: Session) -> str:
        id = new_id()
        with self._lock:
            self._check_capacity(len(self._sessions), self.n_bytes)
            self._sessions[id] = session
            if session.state is not None:
                self._usage.add(session.state.memory)
        return id

    def _uncount(self, session: Session) -> None:
        if session.state is not None:
            self._usage.remove(session.state.memory)
