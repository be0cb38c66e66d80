"""Sessions stored in a folder that several servers may share; any of them can continue any session.

A session is one file that is replaced atomically. A call that continues a session holds its file lock, which the operating system
releases if the process dies: nothing has to be cleaned up, and completed turns are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from linnet.core.errors import UserError, invalid
from linnet.core.files import parse_json
from linnet.serve import state as states
from linnet.serve.request import AnswerLost, NoSession, SessionInUse
from linnet.serve.sessions import Session, SessionLimits, empty_session, new_id
from linnet.serve.state import State

ID = re.compile(r"session-[A-Za-z0-9_-]{22}")
"""Format of `new_id`. Checked because ids come from clients and become file names."""
MAX_HEAD = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """The first line of a session's file; the state follows."""

    n_tokens: int
    call: str
    """The call that wrote this state. A retry of the same call must not continue from its own result."""


class FolderSessions(SessionLimits):
    """The sessions of one model, usable from any thread of any process. Sessions are never evicted, only deleted by the client."""

    def __init__(self, folder: Path, abstract_state: Callable[[int], Any], model: str, **limits: int) -> None:
        super().__init__(abstract_state, model, **limits)
        self._folder = folder / model[:32]  # a state is only valid for the weights that made it
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(self._folder / "room.lock"):
                pass
        except OSError as error:
            needs = f"a writable folder ({error.strerror})"
            raise invalid("--sessions", str(folder), needs, "choose another folder") from None
        self._leases: dict[str, tuple[int, str]] = {}
        """File descriptor of the lock, and the call that acquired it, by session id."""

    def create(self) -> str:
        return self._add(lambda path: _write(path, Head(n_tokens=0, call=""), b""))

    def n_tokens(self, id: str) -> int:
        with self._open(id) as file:
            return _head(id, file.readline(MAX_HEAD)).n_tokens

    def acquire(self, id: str, call: str) -> None:
        try:
            lock = os.open(_lock(self._path(id)), os.O_RDWR)
        except FileNotFoundError:
            raise NoSession(id) from None
        try:
            _try_lock(lock, id)
            with self._open(id) as file:
                if _head(id, file.readline(MAX_HEAD)).call == call:
                    raise AnswerLost(id)
        except BaseException:
            os.close(lock)
            raise
        self._leases[id] = (lock, call)

    def release(self, id: str) -> None:
        os.close(self._leases.pop(id)[0])

    def get(self, id: str) -> Session:
        data = self._state(id)
        return self.unpack(data) if data else Session(None, 0)

    def put(self, id: str, state: State, n_tokens: int) -> None:
        """Replace the session's state. Once this returns, the new state survives the death of this process."""
        path, (_, call) = self._path(id), self._leases[id]
        _write(_new(path), Head(n_tokens=n_tokens, call=call), states.to_bytes(state))
        os.replace(_new(path), path)

    def fork(self, id: str) -> str:
        """Copy a session with a hard link. Files are replaced and never modified, so the two stay independent."""

        def link(path: Path) -> None:
            try:
                os.link(self._path(id), path)
            except FileNotFoundError:
                raise NoSession(id) from None

        return self._add(link)

    def save(self, id: str) -> bytes:
        data = self._state(id)
        if not data:
            raise empty_session(id)
        return data

    def restore(self, data: bytes) -> str:
        session = self.unpack(data)
        return self._add(lambda path: _write(path, Head(n_tokens=session.n_tokens, call=""), data))

    def delete(self, id: str) -> None:
        try:
            self._path(id).unlink()
        except FileNotFoundError:
            raise NoSession(id) from None
        _lock(self._path(id)).unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self._sizes()[0])

    @property
    def n_bytes(self) -> int:
        """Bytes of all states; a file shared by forks counts once."""
        return sum(self._sizes()[1].values())

    def _sizes(self) -> tuple[list[str], dict[int, int]]:
        """Return the ids, and the size of each file by inode."""
        ids, sizes = [], {}
        for entry in os.scandir(self._folder):
            if ID.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):  # deleted just now
                    status = os.stat(entry.path)
                    ids.append(entry.name)
                    sizes[status.st_ino] = status.st_size
        return ids, sizes

    def _add(self, make: Callable[[Path], None]) -> str:
        """Add a session whose file `make` writes, if the limits allow it."""
        id = new_id()
        path = self._path(id)
        make(_new(path))
        try:
            with _locked(self._folder / "room.lock"):
                ids, sizes = self._sizes()
                self._check_capacity(len(ids), sum(sizes.values()))
                os.close(os.open(_lock(path), os.O_RDWR | os.O_CREAT, 0o600))
                os.replace(_new(path), path)
        except BaseException:
            _new(path).unlink(missing_ok=True)
            raise
        return id

    def _path(self, id: str) -> Path:
        if not ID.fullmatch(id):
            raise NoSession(id)
        return self._folder / id

    def _open(self, id: str) -> Any:
        try:
            return open(self._path(id), "rb")
        except FileNotFoundError:
            raise NoSession(id) from None

    def _state(self, id: str) -> bytes:
        """Return the serialized state; empty if the session has read nothing yet."""
        with self._open(id) as file:
            head, data = _head(id, file.readline(MAX_HEAD)), file.read()
        if head.n_tokens and not data:
            raise _damaged(id)
        return data


def _new(path: Path) -> Path:
    """Temporary file for an atomic write. There is one writer: the lock's holder, or the creator before the id is known."""
    return path.with_name(f"{path.name}.new")


def _lock(path: Path) -> Path:
    """Separate lock file, because a lock belongs to an inode and every turn replaces the session's file."""
    return path.with_name(f"{path.name}.lock")


def _write(path: Path, head: Head, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(json.dumps(dataclasses.asdict(head)).encode() + b"\n")
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _head(id: str, line: bytes) -> Head:
    try:
        return Head(**parse_json(line))
    except (ValueError, TypeError):
        raise _damaged(id) from None


def _damaged(id: str) -> UserError:
    return UserError(
        f"the file of session {id!r} is damaged. Fix: delete the session, or restore it from a saved state."
    )


def _try_lock(lock: int, id: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SessionInUse(id) from None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock. Opens the file each time, because threads that share an open file share its lock."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600)) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
