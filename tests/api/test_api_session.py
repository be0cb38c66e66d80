"""Sessions of the Python API: appended equals given at once, forks are independent, restored equals never stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import linnet

MADE = Path(__file__).parents[1] / "goldens" / "runs_0_1"
PARTS = ("The finch", " follows the", " wren")


@pytest.fixture(scope="module")
def runs() -> dict[str, linnet.Run]:
    return {name: linnet.load(MADE / name) for name in ("vq", "moe")}


@pytest.fixture(params=["vq", pytest.param("moe", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, runs: dict[str, linnet.Run]) -> linnet.Run:
    return runs[request.param]


def test_appending_then_generating_equals_generating_from_the_full_prompt(run: linnet.Run) -> None:
    """With the penalty too, which counts the prompt, and where the tokenizer drops a leading space."""
    whole = run.generate("".join(PARTS), max_tokens=40, seed=5, repetition_penalty=1.3)
    with run.session() as session:
        for part in PARTS[:2]:
            session.append(part)
        answer = session.generate(PARTS[2], max_tokens=40, seed=5, repetition_penalty=1.3)
        assert (answer, answer.token_ids, answer.finish_reason) == (whole, whole.token_ids, whole.finish_reason)
    with run.session() as session:
        session.append("".join(PARTS))
        assert session.generate(max_tokens=40, seed=5, repetition_penalty=1.3) == whole
        assert session.n_tokens == len(run.encode("".join(PARTS))) + 40


def test_turn_continues_the_conversation(run: linnet.Run) -> None:
    """As one prompt of ids: a session that continues equals a prompt of all that was said."""
    import numpy as np

    with run.session() as session:
        first = session.generate("The owl", max_tokens=12, temperature=0, ignore_eos=True)
        second = session.generate(max_tokens=12, temperature=0, ignore_eos=True)
    ids = np.array([*run.encode("The owl"), *first.token_ids], np.int32)
    assert run.generate(ids, max_tokens=12, temperature=0, ignore_eos=True).token_ids == second.token_ids


def test_forks_are_independent(run: linnet.Run) -> None:
    session = run.session().append("The owl")
    fork = session.fork()
    first = session.generate(" sees", max_tokens=10, seed=1)
    fork.generate(" and the wren", max_tokens=30, seed=9)
    again = run.session().append("The owl").generate(" sees", max_tokens=10, seed=1)
    assert first == again
    assert session.n_tokens != fork.n_tokens


def test_streams_advance_the_session_at_their_end(run: linnet.Run) -> None:
    session, other = run.session(), run.session()
    whole = session.generate("The owl", max_tokens=40, seed=2)
    pieces = list(other.generate("The owl", max_tokens=40, seed=2, stream=True))
    assert len(pieces) > 1
    assert "".join(pieces) == whole
    assert pieces[-1].finish_reason == whole.finish_reason
    assert other.to_bytes() == session.to_bytes()


def test_stream_that_is_closed_leaves_the_session_as_it_was(run: linnet.Run) -> None:
    session = run.session().append("The owl")
    before = session.to_bytes()
    stream = session.generate(max_tokens=200, seed=2, stream=True, ignore_eos=True)
    next(stream)
    with pytest.raises(linnet.UserError, match="generating"):
        session.append(" sees")
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert session.to_bytes() == before
    session.generate(max_tokens=200, stream=True)  # not begun
    assert session.generate(max_tokens=5, seed=2) == run.generate("The owl", max_tokens=5, seed=2)


def test_session_restored_in_another_process_equals_one_that_never_stopped(run: linnet.Run, tmp_path: Path) -> None:
    session = run.session()
    session.generate("The owl", max_tokens=12, seed=4)
    file = session.save(tmp_path / "new" / "session")
    program = (
        "import sys, linnet; s = linnet.load(sys.argv[1]).session(sys.argv[2]);"
        "print(list(s.generate(' and', max_tokens=16, seed=6).token_ids))"
    )
    command = [sys.executable, "-c", program, str(run.path), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert json.loads(done.stdout) == list(session.generate(" and", max_tokens=16, seed=6).token_ids)


@pytest.mark.parametrize("name", ["vq", pytest.param("moe", marks=pytest.mark.slow)])
def test_server_states_continue_in_the_python_api(runs: dict[str, linnet.Run], name: str) -> None:
    """Those that the server of 0.1 saved after two turns."""
    (file,) = (MADE / "states").glob(f"{name}*")
    session = runs[name].session(file)
    assert session.n_tokens > 24
    assert session.to_bytes() == file.read_bytes()
    answer = session.generate(" and", max_tokens=8, temperature=0)
    assert answer == runs[name].session(file.read_bytes()).generate(" and", max_tokens=8, temperature=0)


def test_bad_sessions_are_errors(runs: dict[str, linnet.Run], tmp_path: Path) -> None:
    vq, moe = runs["vq"], runs["moe"]
    with pytest.raises(linnet.UserError, match="read nothing yet"):
        vq.session().save(tmp_path / "file")
    state = vq.session().append("The owl").to_bytes()
    with pytest.raises(linnet.UserError, match="another model"):
        moe.session(state)
    with pytest.raises(linnet.UserError, match="damaged"):
        vq.session(state[:-9])
    with pytest.raises(linnet.UserError, match="session file that can be read"):
        vq.session(tmp_path / "missing")
    with pytest.raises(linnet.UserError, match="at most 128 tokens"):
        moe.session().append("The owl sees the wren. " * 40)
    with pytest.raises(linnet.UserError, match="temperature"):
        vq.session().generate(temperature=-1)
    with pytest.raises(linnet.UserError, match="max_tokens"):
        vq.session().generate(max_tokens=0, stream=True)
    with pytest.raises(linnet.UserError, match="a str or bytes"):
        vq.session().append(7)  # pyright: ignore[reportArgumentType]
    with vq.session() as session:
        pass
    with pytest.raises(linnet.UserError, match="closed"):
        session.append("x")
    assert repr(session) == "Session(closed)"
