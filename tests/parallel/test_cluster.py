"""The processes of a cluster: what the environment says of them, who is gone, who is slow. No JAX, no second process."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE, until

from linnet.cli.launch import first_failure, process_cores
from linnet.core.errors import UserError
from linnet.parallel.cluster.environment import ALONE, Member, Timeouts, find_cluster_env, find_timeouts
from linnet.parallel.cluster.heartbeat import FAILED_SECONDS, Beat, FailureDetector, Heartbeat, MissedBeats
from linnet.parallel.cluster.lifecycle import is_peer_failure
from linnet.train.stragglers import NullMonitor, StragglerMonitor, monitor, stragglers

EXPLICIT = {"LINNET_COORDINATOR": "node0:1234", "LINNET_PROCESSES": "4", "LINNET_PROCESS_ID": "2"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[001-004]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
}


# Where it is.


def test_empty_environment_means_a_single_process(tmp_path: Path) -> None:
    assert find_cluster_env({}, tmp_path) == ALONE
    batch_script = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    assert find_cluster_env(batch_script, tmp_path) == ALONE  # the script of sbatch itself, not a task of srun's
    assert find_cluster_env({**SLURM, "SLURM_NTASKS": "1"}, tmp_path) == ALONE
    assert find_cluster_env({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path) == ALONE  # any pod


def test_linnets_own_variables_come_first(tmp_path: Path) -> None:
    env = find_cluster_env({**SLURM, **EXPLICIT}, tmp_path)
    assert (env.kind, env.coordinator, env.index, env.count) == ("explicit", "node0:1234", 2, 4)
    assert find_cluster_env({**SLURM, "LINNET_PROCESSES": "1"}, tmp_path) == ALONE


def test_slurm_step_and_an_indexed_job_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = find_cluster_env(SLURM, tmp_path)
    assert (env.kind, env.index, env.count) == ("slurm", 3, 4)
    job = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="LINNET_COORDINATOR"):
        find_cluster_env(job, tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert find_cluster_env(job, tmp_path).kind == "kubernetes"


def test_machine_with_tpu_chips_queries_jax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "accel0").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert find_cluster_env({}, tmp_path) == ALONE  # chips without their library
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert find_cluster_env({}, tmp_path).kind == "tpu"
    assert find_cluster_env({"JAX_PLATFORMS": "cpu"}, tmp_path) == ALONE


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"LINNET_PROCESSES": None}, "LINNET_PROCESSES"),
        ({"LINNET_PROCESSES": "four"}, "LINNET_PROCESSES"),
        ({"LINNET_PROCESSES": "0"}, "LINNET_PROCESSES"),
        ({"LINNET_PROCESS_ID": None}, "LINNET_PROCESS_ID"),
        ({"LINNET_PROCESS_ID": "4"}, "LINNET_PROCESS_ID"),
        ({"LINNET_PROCESS_ID": "-1"}, "LINNET_PROCESS_ID"),
        ({"LINNET_COORDINATOR": None}, "LINNET_COORDINATOR"),
        ({"LINNET_COORDINATOR": "node0"}, "LINNET_COORDINATOR"),
        ({"LINNET_COORDINATOR": "node0:99999"}, "LINNET_COORDINATOR"),
    ],
)
def test_incomplete_settings_are_rejected_by_name(changes: dict[str, str | None], named: str, tmp_path: Path) -> None:
    environ = {name: value for name, value in {**EXPLICIT, **changes}.items() if value is not None}
    with pytest.raises(UserError, match=named):
        find_cluster_env(environ, tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"SLURM_PROCID": None}, "SLURM_PROCID"),
        ({"SLURM_LOCALID": None}, "SLURM_LOCALID"),
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID"),
        ({"SLURM_NTASKS": "many"}, "SLURM_NTASKS"),
    ],
)
def test_broken_slurm_step_is_rejected_by_name(changes: dict[str, str | None], named: str, tmp_path: Path) -> None:
    environ = {name: value for name, value in {**SLURM, **changes}.items() if value is not None}
    with pytest.raises(UserError, match=named):
        find_cluster_env(environ, tmp_path)


def test_timeouts_have_defaults_and_reject_invalid_values() -> None:
    assert find_timeouts({}) == Timeouts(lost=30.0, start=300.0)
    assert find_timeouts({"LINNET_LOST_SECONDS": "4.5"}).lost == 4.5
    for bad in ("soon", "0", "nan"):
        with pytest.raises(UserError, match="LINNET_START_SECONDS"):
            find_timeouts({"LINNET_START_SECONDS": bad})


@pytest.mark.parametrize(("n_core", "n"), [(2, 4), (8, 3), (8, 8), (1, 1), (5, 2)])
def test_every_process_has_a_core_and_no_core_is_left_out(n_core: int, n: int) -> None:
    cores = list(range(10, 10 + n_core))
    shares = [process_cores(cores, i, n) for i in range(n)]
    assert all(shares)
    assert {core for share in shares for core in share} == set(cores)
    if n <= n_core:
        assert sum(map(len, shares)) == n_core


def test_process_that_reports_a_lost_peer_is_not_blamed() -> None:
    assert first_failure([(0, 76), (2, 137), (3, 76)]) == (2, 137)
    assert first_failure([(1, 76)]) == (1, 76)


# Who is gone.


def beat(index: int, sequence: int = 0, **more: object) -> Beat:
    return dataclasses.replace(Beat(index=index, host=f"h{index}", sequence=sequence), **more)  # pyright: ignore[reportArgumentType]


def test_process_without_new_beats_is_lost_after_the_timeout_and_named() -> None:
    detector = FailureDetector(3)
    for n in range(5):
        detector.update([beat(0, n), beat(1, n, step=n), beat(2, min(n, 1), step=17)], 1.0)
    assert [one.index for one in detector.missed(2.0)] == [2]
    assert detector.verdict(4.0, 4.0) is None
    for n in range(5, 7):
        detector.update([beat(0, n), beat(1, n), beat(2, 1, step=17)], 1.0)
    words = detector.verdict(4.0, 4.0)
    assert words is not None
    assert "process 2 on h2" in words
    assert "step 17" in words
    assert "process 1" not in words


def test_process_without_any_heartbeat_counts_as_lost() -> None:
    detector = FailureDetector(2)
    for n in range(6):
        detector.update([beat(0, n)], 1.0)
    assert "process 1 " in str(detector.verdict(4.0, 4.0))


def test_broken_connection_shortens_the_timeout_but_blames_no_live_process() -> None:
    detector = FailureDetector(2)
    for n in range(4):
        detector.update([beat(0, n, broken=True), beat(1, n)], 1.0)
    assert detector.verdict(30.0, 2.0) is None
    for n in range(4, 8):
        detector.update([beat(0, n, broken=True), beat(1, 3)], 1.0)
    assert "process 1" in str(detector.verdict(30.0, 2.0))


def test_failed_process_is_reported_with_its_reason_after_the_grace_period() -> None:
    detector = FailureDetector(2)
    detector.update([beat(0), beat(1, 1, failed="the disk is full")], 1.0)
    assert detector.verdict(30.0, 30.0) is None
    detector.update([beat(0, 1, broken=True), beat(1, 1, failed="the disk is full")], FAILED_SECONDS - 1.0)
    assert detector.verdict(30.0, 2.0) is None  # silent, with a connection broken: but it has said why
    detector.update([beat(0, 2), beat(1, 1, failed="the disk is full")], 1.0)
    assert "the disk is full" in str(detector.verdict(30.0, 30.0))


class Board:
    """The key-value store, in memory; `down` makes it behave as one whose process is gone or stopped."""

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}
        self.n_written = 0
        self.down: Callable[[], None] = lambda: None

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self.down()
        self.notes[key] = value
        self.n_written += 1

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        self.down()
        return [(name, text) for name, text in list(self.notes.items()) if name.startswith(key)]


class Left:
    def __init__(self) -> None:
        self.words: list[str] = []
        self.at = threading.Event()

    def __call__(self, words: str, after: float) -> None:
        self.words.append(words)
        self.at.set()
        time.sleep(3600)  # as one who leaves says nothing more


def beating(board: Board, index: int, count: int, lost: float = 3.0) -> tuple[Heartbeat, Left]:
    left = Left()
    member = Member(index=index, count=count, host=f"h{index}")
    return Heartbeat(board, member, Timeouts(lost=lost, start=9.0), "h0:1234", left), left


def test_all_processes_report_the_silent_process_and_the_last_checkpoint() -> None:
    board = Board()
    heartbeats = [beating(board, i, 3) for i in range(3)]
    for heartbeat, _ in heartbeats:
        heartbeat.describe_saved = lambda: "Nothing after step 15 is kept."
        heartbeat.start()
    heartbeats[2][0].stepped(17, 0.0)
    written = board.n_written
    until(lambda: board.n_written >= written + 9)  # several heartbeats of each
    assert not any(left.words for _, left in heartbeats)
    heartbeats[2][0].stop()  # killed, for all the others can see
    for _, left in heartbeats[:2]:
        assert left.at.wait(PATIENCE)
        assert "process 2 on h2" in left.words[0]
        assert "step 17" in left.words[0]
        assert "Nothing after step 15 is kept." in left.words[0]
        assert "--restarts" in left.words[0]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["refused", "stuck"])
def test_process_0_is_lost_when_its_store_is_gone_or_hangs(how: str) -> None:
    board = Board()
    heartbeat, left = beating(board, 1, 2)
    heartbeat.start()

    def gone() -> None:
        if how == "stuck":
            time.sleep(3600)
        raise RuntimeError("UNAVAILABLE")

    board.down = gone
    assert left.at.wait(PATIENCE)
    assert "process 0 at h0:1234" in left.words[0]


def test_reported_failure_is_received_from_a_process_that_exits_at_once() -> None:
    board = Board()
    (judge, left), (other, _) = beating(board, 0, 2), beating(board, 1, 2)
    judge.start()
    other.fail("no room on the disk")
    assert left.at.wait(PATIENCE)
    assert "no room on the disk" in left.words[0]


def wrapped(error: Exception) -> Exception:
    try:
        try:
            raise error
        except Exception as cause:
            raise UserError("The checkpoint of step 3 could not be written.") from cause
    except UserError as found:
        return found


def test_peer_failure_is_recognized_by_its_status_anywhere_in_the_chain() -> None:
    gloo = ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:14746")
    assert is_peer_failure(gloo)
    assert is_peer_failure(wrapped(RuntimeError("UNAVAILABLE: Socket closed")))
    assert not is_peer_failure(wrapped(OSError("No space left on device")))
    assert not is_peer_failure(UserError("data.source is UNKNOWN: it must be a file."))


def test_single_process_has_no_monitor() -> None:
    with monitor(log=print, notify=print, saved=lambda: None) as watch:
        assert isinstance(watch, NullMonitor)
        watch.stepped(1, 0.0)
    with pytest.raises(ValueError, match="UNKNOWN"), monitor(log=print, notify=print, saved=lambda: None):
        raise ValueError("UNKNOWN: passes through at once")


# Who is slow.


def test_slow_host_and_slow_core_are_distinguished() -> None:
    usual: dict[str, Any] = {"host_seconds": 0.010, "probe_seconds": 0.001}
    beats = {i: beat(i, **usual) for i in range(4)}
    assert stragglers(beats) == {}
    beats[2] = beat(2, host_seconds=0.062, probe_seconds=0.001)
    beats[3] = beat(3, host_seconds=0.010, probe_seconds=0.0045)
    found = stragglers(beats)
    assert set(found) == {2, 3}
    assert "6.2 times" in found[2]
    assert "host" in found[2]
    assert "4.5 times" in found[3]


def test_small_host_work_is_no_straggler_and_two_processes_are_distinguished() -> None:
    assert stragglers({0: beat(0, host_seconds=0.0001), 1: beat(1, host_seconds=0.001)}) == {}
    assert set(stragglers({0: beat(0, host_seconds=0.01), 1: beat(1, host_seconds=0.1)})) == {1}
    assert stragglers({0: beat(0, host_seconds=0.01)}) == {}


def test_straggler_is_named_once_and_only_when_it_was_slow_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat, _ = beating(Board(), 0, 3)
    now, output = [0.0], []
    monkeypatch.setattr("linnet.train.stragglers.time.monotonic", lambda: now[0])
    watch = StragglerMonitor(heartbeat, lambda step, words: output.append((step, words)), lambda words: None)

    def step(n: int, slow: bool) -> None:
        now[0] += heartbeat.late_seconds + 0.1
        heartbeat.detector.update([beat(i, n, host_seconds=0.5 if slow and i == 1 else 0.01) for i in range(3)], 1.0)
        watch.stepped(n, 0.01)

    step(1, slow=True)
    assert not output
    step(2, slow=True)
    step(3, slow=True)
    assert [at for at, _ in output] == [2]
    assert "Process 1 on h1" in output[0][1]
    for n, slow in ((4, False), (5, True), (6, True)):
        step(n, slow)
    assert [at for at, _ in output] == [2, 6]


def test_straggler_wait_is_logged_immediately_and_recorded_on_resume() -> None:
    heartbeat, _ = beating(Board(), 0, 3)
    reported: list[str] = []
    output: list[tuple[int, str]] = []
    watch = StragglerMonitor(heartbeat, lambda step, words: output.append((step, words)), reported.append)
    assert heartbeat.on_late is not None
    for seconds in (6.0, 7.0):
        heartbeat.on_late([MissedBeats(index=2, seconds=seconds, last=beat(2, step=17))])
    assert reported == ["Waiting for process 2 on h2 for 6 s, last seen at step 17."]
    heartbeat.detector.update([beat(2, 9)], 0.0)
    heartbeat.on_late([])
    assert not output
    watch.stepped(18, 0.0)
    assert output == [(18, "Process 2 on h2 sent no heartbeat for 7 s, and has recovered.")]
