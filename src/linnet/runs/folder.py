"""The run folder: where each file of a run lives, and the lock that lets one training at a time write there.

The lock belongs to an open file, so it dies with its process: SIGKILL or a power cut leaves nothing stale.
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
        """Makes the folder and the folders in it. What is there already stays as it is."""
        try:
            for folder in (self.path, self.checkpoints, self.samples):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            needs = f"a folder that can be written ({error.strerror or error})"
            raise invalid("run", str(self.path), needs, "give another folder, or mend its permissions") from error
        return self

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the folder for one training. Evaluating and sampling do not lock, so they work meanwhile."""
        self.create()
        try:
            file = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            needs = f"a folder that can be written ({error.strerror or error})"
            raise invalid("run", str(self.path), needs, "give another folder, or mend its permissions") from error
        try:
            _take(file, self.path)
            _write(file, {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()})
            try:
                yield
            finally:
                os.ftruncate(file, 0)
        finally:
            os.close(file)  # This frees the lock. The file stays: removing it would let two runs lock two files.


def _take(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _held(path, _read(file)) from None
    except OSError as error:
        message = f"The run folder {str(path)!r} cannot be locked ({error.strerror or error})."
        raise UserError(f"{message} Fix: use a folder on a disk that supports file locks.") from error


def _held(path: Path, holder: dict[str, Any]) -> UserError:
    pid, host, started = holder.get("pid"), holder.get("host"), holder.get("started")
    if not isinstance(pid, int) or not isinstance(started, (int, float)):
        who, stop = "a process that has just started", "stop it"
    else:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started))
        who = f"process {pid} on {host}, since {since}"
        stop = f"stop it with `kill {pid}` on {host} (it saves and exits)"
    needs = f"a folder that no other training uses (it is held by {who})"
    return invalid("run", str(path), needs, f"wait for it to end, {stop}, or give another folder")


def _read(file: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(file, 4096, 0))
    except ValueError:  # The holder has locked but not yet written its name.
        return {}
    return found if isinstance(found, dict) else {}


def _write(file: int, holder: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # On a full disk the lock holds all the same, only without a name.
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(holder).encode(), 0)
