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
from linnet.serve.state import HeldBytes, State

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


def check_room_for(n: int, most: int, n_bytes: int, most_bytes: int) -> None:
    if n >= most:
        raise UserError(f"the maximum number of sessions ({most}) is reached. Fix: delete a session first.")
    if n_bytes >= most_bytes:
        held = f"{n_bytes >> 20:,} MB of {most_bytes >> 20:,}"
        raise UserError(
            f"the memory for session states is full ({held}). Fix: delete a session first, or raise --sessions-mb."
        )


def nothing_read(id: str) -> UserError:
    return UserError(f"session {id[:64]!r} is empty. Fix: use it in a call before saving it.")


class Sessions:
    """The sessions of one model. Thread-safe. Sessions are never evicted: without room, creating one is an error, while existing
    ones can always continue."""

    def __init__(
        self, like: Callable[[int], Any], model: str, *, most: int = MAX_SESSIONS, most_bytes: int = MAX_BYTES
    ) -> None:
        self._like, self._model, self._most, self._most_bytes = like, model, most, most_bytes
        self._sessions: dict[str, Session] = {}
        self._held = HeldBytes()
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

    def hold(self, id: str, call: str) -> None:
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
                self._held.add(state.memory)  # first, so that arrays shared with the old state stay counted
                self._let_go(self._sessions[id])
                self._sessions[id] = Session(state, n_tokens)

    def fork(self, id: str) -> str:
        """Copy a session. States are immutable, so the two can share one."""
        return self._add(self.get(id))

    def save(self, id: str) -> bytes:
        session = self.get(id)
        if session.state is None:
            raise nothing_read(id)
        return states.to_bytes(session.state)

    def restore(self, data: bytes) -> str:
        return self._add(self.unpack(data))

    def pack(self, state: State) -> bytes:
        """Serialize a state that the client keeps. It does not count towards the limits."""
        return states.to_bytes(state)

    def unpack(self, data: bytes) -> Session:
        """Deserialize and validate the output of `pack` or `save`."""
        state = states.from_bytes(data, self._like, self._model)
        return Session(state, state.n_conversation)

    def delete(self, id: str) -> None:
        self.get(id)
        with self._lock:
            if (session := self._sessions.pop(id, None)) is not None:
                self._let_go(session)

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def n_bytes(self) -> int:
        """Bytes of all states; arrays shared by several count once."""
        return self._held.total

    def _add(self, session: Session) -> str:
        id = new_id()
        with self._lock:
            check_room_for(len(self._sessions), self._most, self.n_bytes, self._most_bytes)
            self._sessions[id] = session
            if session.state is not None:
                self._held.add(session.state.memory)
        return id

    def _let_go(self, session: Session) -> None:
        if session.state is not None:
            self._held.drop(session.state.memory)
