"""The run folder: the paths of a run's files, and the lock that lets only one training process write to it.

The lock belongs to an open file and is released when its process ends, so SIGKILL or a power failure leaves no stale lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from linnet.core.errors import UserError, invalid
from linnet.core.local_path import check_local


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The paths of one run. Nothing is written before `create`."""

    path: Path

    def __post_init__(self) -> None:
        check_local("run", self.path)

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def create(self) -> RunFolder:
        """Create the folder and its subfolders. Existing files are not changed."""
        try:
            for folder in (self.path, self.checkpoints, self.samples):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            needs = f"a folder that can be written ({error.strerror or error})"
            raise invalid("run", str(self.path), needs, "give another folder, or correct its permissions") from error
        return self

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder for training. Evaluation and sampling take no lock, so they can run at the same time."""
        self.create()
        try:
            file = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            needs = f"a folder that can be written ({error.strerror or error})"
            raise invalid("run", str(self.path), needs, "give another folder, or correct its permissions") from error
        try:
            _acquire(file, self.path)
            _write(file, {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()})
            try:
                yield
            finally:
                os.ftruncate(file, 0)
        finally:
            os.close(file)  # This releases the lock. The file is kept: removing it would let two runs lock two files.


def _acquire(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _locked_error(path, _read(file)) from None
    except OSError as error:
        message = f"The run folder {str(path)!r} cannot be locked ({error.strerror or error})."
        raise UserError(f"{message} Fix: use a folder on a disk that supports file locks.") from error


def _locked_error(path: Path, holder: dict[str, Any]) -> UserError:
    pid, host, started = holder.get("pid"), holder.get("host"), holder.get("started")
    if not isinstance(pid, int) or not isinstance(started, (int, float)):
        who, stop = "a process that has just started", "stop it"
    else:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started))
        who = f"process {pid} on {host}, since {since}"
        stop = f"stop it with `kill {pid}` on {host} (it saves and exits)"
    needs = f"a folder that no other training uses (it is locked by {who})"
    return invalid("run", str(path), needs, f"wait for it to end, {stop}, or give another folder")


def _read(file: int) -> dict[str, Any]:
    try:
        holder = json.loads(os.pread(file, 4096, 0))
    except ValueError:  # The holder has the lock but has not written its details yet.
        return {}
    return holder if isinstance(holder, dict) else {}


def _write(file: int, holder: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # On a full disk the lock is still valid, only without details.
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(holder).encode(), 0)
