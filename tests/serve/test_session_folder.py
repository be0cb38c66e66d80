"""Sessions in a folder shared by several servers."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from linnet.core.errors import UserError
from linnet.serve.request import AnswerLost, NoSession, SessionInUse
from linnet.serve.session_folder import FolderSessions
from linnet.serve.state import State

MODEL = "f" * 64
N = 1000


def folder_sessions(folder: Path, model: str = MODEL, **more: int) -> FolderSessions:
    return FolderSessions(folder, lambda n: {"memory": np.zeros(N, np.float32)}, model, **more)


def state(value: float, n_tokens: int = 9) -> State:
    return State(memory={"memory": np.full(N, value, np.float32)}, last=5, n_tokens=n_tokens, model=MODEL)


def turn(sessions: FolderSessions, id: str, value: float, call: str, n_tokens: int = 9) -> None:
    sessions.acquire(id, call)
    sessions.put(id, state(value, n_tokens), n_tokens - 1)
    sessions.release(id)


def value(sessions: FolderSessions, id: str) -> float:
    found = sessions.get(id).state
    assert found is not None
    (one,) = np.unique(found.memory["memory"])
    return float(one)


def test_another_server_can_continue_a_session(tmp_path: Path) -> None:
    one, other = folder_sessions(tmp_path), folder_sessions(tmp_path)
    id = one.create()
    assert other.get(id).state is None
    assert other.n_tokens(id) == 0
    turn(other, id, 1.0, "first")
    assert value(one, id) == 1.0
    turn(one, id, 2.0, "second", n_tokens=20)
    assert (value(other, id), other.n_tokens(id), other.get(id).n_tokens) == (2.0, 19, 19)
    restored = other.restore(one.save(id))
    assert (value(one, restored), one.n_tokens(restored)) == (2.0, 19)
    assert one.save(restored) == one.save(id)


def test_session_lock_is_exclusive_across_servers(tmp_path: Path) -> None:
    one, other = folder_sessions(tmp_path), folder_sessions(tmp_path)
    id = one.create()
    one.acquire(id, "a")
    for sessions in (one, other):
        with pytest.raises(SessionInUse):
            sessions.acquire(id, "b")
    one.put(id, state(1.0), 8)  # the file is replaced, the lock stays
    with pytest.raises(SessionInUse):
        other.acquire(id, "b")
    one.release(id)
    other.acquire(id, "b")
    other.release(id)


def test_concurrent_turns_are_not_lost(tmp_path: Path) -> None:
    servers = [folder_sessions(tmp_path) for _ in range(4)]
    id = servers[0].create()
    turn(servers[0], id, 0.0, "begin")
    n_turns = [0] * 4

    def work(i: int) -> None:
        while n_turns[i] < 5:
            try:
                servers[i].acquire(id, f"{i}-{n_turns[i]}")
            except SessionInUse:
                continue
            servers[i].put(id, state(value(servers[i], id) + 1), 8)
            n_turns[i] += 1
            servers[i].release(id)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert value(servers[0], id) == 20.0


def test_retried_call_is_not_applied_twice(tmp_path: Path) -> None:
    one, other = folder_sessions(tmp_path), folder_sessions(tmp_path)
    id = one.create()
    turn(one, id, 1.0, "req_1")
    with pytest.raises(AnswerLost):
        other.acquire(id, "req_1")
    turn(other, id, 2.0, "req_2")
    assert value(one, id) == 2.0
    one.acquire(id, "req_3")  # ended before it put anything
    one.release(id)
    turn(other, id, 3.0, "req_3")
    assert value(one, id) == 3.0


def test_fork_is_independent_and_shares_its_file(tmp_path: Path) -> None:
    sessions = folder_sessions(tmp_path)
    id = sessions.create()
    turn(sessions, id, 1.0, "a")
    before = sessions.n_bytes
    fork = sessions.fork(id)
    assert (sessions.n_bytes, len(sessions)) == (before, 2)
    turn(sessions, fork, 2.0, "b")
    assert (value(sessions, id), value(sessions, fork)) == (1.0, 2.0)
    assert sessions.n_bytes > before


def test_limits_count_over_all_servers(tmp_path: Path) -> None:
    one, other = folder_sessions(tmp_path, max_sessions=2), folder_sessions(tmp_path, max_sessions=2)
    first = one.create()
    other.create()
    for sessions in (one, other):
        with pytest.raises(UserError, match="maximum number of sessions"):
            sessions.create()
    other.delete(first)
    turn(one, one.create(), 1.0, "a")
    small = folder_sessions(tmp_path, max_bytes=N)
    with pytest.raises(UserError, match="memory for session states is full"):
        small.create()
    left = {path.suffix for path in (tmp_path / MODEL[:32]).iterdir()}
    assert left == {"", ".lock"}, "what found no room left nothing behind"


def test_deleted_session_is_gone_for_all_servers(tmp_path: Path) -> None:
    one, other = folder_sessions(tmp_path), folder_sessions(tmp_path)
    id = one.create()
    other.delete(id)
    for call in (one.n_tokens, one.get, one.fork, one.save, one.delete, lambda id: one.acquire(id, "a")):
        with pytest.raises(NoSession):
            call(id)


@pytest.mark.parametrize("id", ["../room.lock", "room.lock", "session-", "session-" + "../" * 7 + "a", "x" * 5000, ""])
def test_id_cannot_name_another_file(tmp_path: Path, id: str) -> None:
    sessions = folder_sessions(tmp_path)
    for call in (sessions.n_tokens, sessions.get, sessions.fork, sessions.delete, lambda id: sessions.acquire(id, "a")):
        with pytest.raises(NoSession):
            call(id)


def test_corrupt_file_is_rejected(tmp_path: Path) -> None:
    sessions = folder_sessions(tmp_path)
    id = sessions.create()
    turn(sessions, id, 1.0, "a")
    (path,) = tmp_path.rglob(id)
    content = path.read_bytes()
    head = content[: content.index(b"\n") + 1]
    for corrupted in (b"", head, head[:10], content[: len(content) // 2], content[:-1] + bytes([content[-1] ^ 1])):
        path.write_bytes(corrupted)
        with pytest.raises(UserError, match="damaged|modified"):
            sessions.get(id)
    path.write_bytes(content)
    assert value(sessions, id) == 1.0


def test_other_weights_do_not_see_the_session(tmp_path: Path) -> None:
    id = folder_sessions(tmp_path).create()
    with pytest.raises(NoSession):
        folder_sessions(tmp_path, model="e" * 64).n_tokens(id)


def test_unusable_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--sessions"):
        folder_sessions(tmp_path / "file")


def test_empty_session_has_no_state_to_save(tmp_path: Path) -> None:
    sessions = folder_sessions(tmp_path)
    with pytest.raises(UserError, match="is empty"):
        sessions.save(sessions.create())
