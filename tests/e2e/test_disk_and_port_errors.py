"""Commands on a disk that is full or read-only, on a port in use, and interrupted while they start: a sentence, no traceback."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny

from linnet.cli import main
from linnet.config import codec
from linnet.runs.folder import RunFolder
from linnet.runs.metrics import read_metrics
from linnet.train.loop import train

LINNET = [sys.executable, "-c", "from linnet.cli import main; main()"]


class Done(NamedTuple):
    command: str
    code: int
    out: str
    err: str


@pytest.fixture
def linnet(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs a command in this process, which costs no start-up."""

    def run(*arguments: str | Path) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments)])
        written = capsys.readouterr()
        return Done(str(arguments[0]), int(ended.value.code or 0), written.out, written.err)

    return run


def mount(disk: Path, *options: str) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here")


@pytest.fixture
def run_on_disk(tmp_path: Path) -> Iterator[Path]:
    """A finished run on a small disk of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount(disk, "-o", "size=16m")
    changes = {"optim.warmup_steps": 0, "optim.steps": 2, "train.eval_every": 0, "train.checkpoint_every": 0}
    try:
        train(tiny.config(tiny.corpus(tmp_path), **changes), RunFolder(disk / "run"), quiet=True)
        yield disk / "run"
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> None:
    """To the last byte."""
    with open(disk / "filler", "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


def test_full_or_read_only_disk_is_a_user_error_after_the_results(
    run_on_disk: Path, linnet: Callable[..., Done]
) -> None:
    run, disk = run_on_disk, run_on_disk.parent
    fill(disk)
    for kind, why in (("full", "No space left on device"), ("read-only", "Read-only file system")):
        if kind == "read-only":
            (disk / "filler").unlink()
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        evaluated = linnet("eval", run, "--split", "train", "--limit", "4")
        assert re.search(r"train at step 2: \d\.\d+ bits per byte", evaluated.out), kind
        export = linnet("export", run, "--out", disk / "weights.safetensors")
        npz = linnet("export", run, "--format", "transformer-vq", "--out", disk / "weights.npz")
        report, resumed = linnet("report", run), linnet("train", run, "--optim.extra-steps", "2", "--quiet")
        started = linnet("train", run / "config.json", "--out", disk / "new", "--quiet")
        for done in (evaluated, export, npz, report, resumed, started):
            assert done.code == 2, (kind, done)
            assert "Traceback" not in done.err
            assert "Fix: " in done.err
            assert done.err.count("\n") <= 2, done.err
            assert why in done.err or "too full" in done.err, done.err
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert linnet("train", run, "--optim.extra-steps", "2", "--quiet").code == 0, "nothing was lost"


def test_port_in_use_is_reported_before_the_model_loads(tmp_path: Path, linnet: Callable[..., Done]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = linnet("serve", tmp_path / "no-run-there", "--port", str(port))
    assert done.code == 4
    assert f"--port is {port}" in done.err
    assert "Address already in use" in done.err
    assert re.search(r"4 +the port is in use", linnet("--help").out)


def test_interrupt_during_imports_ends_quietly(tmp_path: Path) -> None:
    """A module that the command imports raises the signal, as Ctrl-C at that moment does."""
    program = textwrap.dedent(
        """
        import os, signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
        class Finder:
            def find_spec(self, name, path, target=None):
                if name == sys.argv[-1]:
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Finder())
        from linnet.cli import main
        main(["presets"])
        """
    )
    for module in ("linnet.cli.dispatch", "linnet.cli.presets", "tyro"):
        done = subprocess.run([sys.executable, "-c", program, module], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", ""), module


@pytest.mark.slow
def test_sigterm_in_the_final_evaluation_exits_immediately_and_resumes(
    tmp_path: Path, linnet: Callable[..., Done]
) -> None:
    corpus = tiny.corpus(tmp_path, 3_000_000)
    changes = {
        "optim.warmup_steps": 0,
        "optim.steps": 2,
        "train.log_every": 1,
        "train.eval_every": 0,
        "data.validation_fraction": 0.9,
    }
    config = tmp_path / "config.json"
    codec.save(tiny.config(corpus, **changes), config)
    run = tmp_path / "run"
    command = [*LINNET, "train", str(config), "--out", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    while process.poll() is None and not (run / "checkpoints" / "000000002").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate()
    assert process.returncode == 75, words
    assert "Traceback" not in words
    assert [r for r in read_metrics(run) if r["kind"] == "eval"] == [], "the evaluation takes minutes"
    resumed = linnet("train", run, "--train.eval-sequences", "4", "--quiet")
    assert resumed.code == 0, resumed.err
    assert [r["step"] for r in read_metrics(run) if r["kind"] == "eval"] == [2]
