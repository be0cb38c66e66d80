"""Fuzzes every reader of files: `python tests/support/fuzz_readers.py SEED N READER:FIRST ..` reads the mutated files FIRST to N.

Run as a child process of `fuzz`, so that a crash, a hang or an exhausted memory ends the child, and the parent reports it. A
reader may return or raise UserError; everything else is a failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuzz_mutations import mutate

SECONDS, BYTES = 5.0, 1 << 30
"""CPU time and resident memory that one file may take."""
BLOCKED_SECONDS = 120
"""Wall time of one file: a reader that waits takes no CPU time. Generous, since the machine may be busy."""

Wrap = Callable[[bytes], bytes]


@dataclasses.dataclass(frozen=True)
class Seed:
    """A valid file. `wrap` packs the mutated content into an intact container, so that its checksum does not hide it."""

    name: str
    content: bytes
    wrap: Wrap | None = None

    def mutated(self, others: list[bytes], draw: random.Random) -> bytes:
        if self.wrap is None:
            return mutate(self.content, others, draw)
        if draw.random() < 0.3:
            return mutate(self.wrap(self.content), others, draw)
        return self.wrap(mutate(self.content, others, draw))


@dataclasses.dataclass(frozen=True)
class Reader:
    seeds: Callable[[Path], list[Seed]]
    """Made in an empty folder."""
    read: Callable[[Path], Any]


@dataclasses.dataclass
class Result:
    """Of one reader."""

    n_seeds: int = 0
    n_files: int = 0
    n_refused: int = 0
    worst_seconds: float = 0.0
    worst_bytes: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)


def fuzz(names: list[str], n: int, seed: int = 0, max_failures: int = 20) -> dict[str, Result]:
    """Reads `n` mutated files of each reader in child processes. A child that dies is started again after the file that killed it."""
    results = {name: Result() for name in names}
    jobs = [(name, 0) for name in names]
    while jobs:
        command = [sys.executable, __file__, str(seed), str(n), *(f"{name}:{first}" for name, first in jobs)]
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        name, at = jobs[0][0], -1
        for line in child.stdout.splitlines():
            event = json.loads(line) if line.startswith("{") else {}
            if "file" in event:
                name, at = event["reader"], event["file"]
            if "failure" in event:
                results[name].failures.append(f"{name} {seed} {at}: {event['failure']}")
            if "done" in event:
                result = results[name]
                result.n_seeds, result.n_files = event["n_seeds"], n
                result.n_refused += event["n_refused"]
                result.worst_seconds = max(result.worst_seconds, event["worst_seconds"])
                result.worst_bytes = max(result.worst_bytes, event["worst_bytes"])
                at = n - 1
        if child.returncode == 0:
            return results
        if at < 0:
            raise RuntimeError(f"{name}: the child did not start: {child.stderr[-2000:]}")
        jobs = [(other, first) for other, first in jobs if names.index(other) >= names.index(name)]
        if at == n - 1:
            raise RuntimeError(f"{name}: the child ended with {child.returncode} between files: {child.stderr[-2000:]}")
        results[name].failures.append(
            f"{name} {seed} {at}: the process ended with {child.returncode}: {child.stderr[-500:]}"
        )
        results[name].n_files = at + 1
        jobs = [(name, at + 1), *jobs[1:]] if len(results[name].failures) < max_failures else jobs[1:]
    return results


def run_child(seed: int, last: int, jobs: list[tuple[str, int]]) -> None:
    from fuzz_formats import READERS

    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for name, first in jobs:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
            _fuzz_reader(READERS[name], name, Path(folder), seed, range(first, last))


def _fuzz_reader(reader: Reader, name: str, root: Path, seed: int, numbers: range) -> None:
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    (root / "seeds").mkdir()
    seeds = reader.seeds(root / "seeds")
    done = {"n_seeds": len(seeds), "n_refused": 0, "worst_seconds": 0.0, "worst_bytes": 0}
    for one in seeds:  # a seed that is rejected tests nothing; this also loads all that is imported late
        _place(root / "file", one.name, one.wrap(one.content) if one.wrap else one.content)
        reader.read(root / "file" / one.name)
    contents = [one.content for one in seeds]
    for number in numbers:
        draw = random.Random(f"{name} {seed} {number}")
        one = draw.choice(seeds)
        _place(root / "file", one.name, one.mutated(contents, draw))
        if number % 64 == 0 or number == numbers.start:
            shutil.rmtree(root / "cache", ignore_errors=True)
            _limit_memory()  # relative to what the process holds by now
        print(json.dumps({"reader": name, "file": number}), flush=True)
        with _bounded() as used:
            failure, rejection = _read_one(reader, root / "file" / one.name)
        if used["bytes"] > BYTES:
            failure = f"{used['bytes']:,} bytes of memory"
        if failure:
            print(json.dumps({"failure": failure}), flush=True)
        done["n_refused"] += rejection
        done["worst_seconds"] = max(done["worst_seconds"], used["seconds"])
        done["worst_bytes"] = max(done["worst_bytes"], used["bytes"])
    print(json.dumps({"done": True, **done}), flush=True)


def _read_one(reader: Reader, path: Path) -> tuple[str | None, bool]:
    """What went wrong, and whether the file was rejected."""
    from linnet.core.errors import UserError

    try:
        reader.read(path)
    except UserError as error:
        return None if _is_sentence(str(error)) else f"an error of {len(str(error))} characters: {error!s:.300}", True
    except BaseException:
        return traceback.format_exc(limit=-4), False
    return None, False


def _is_sentence(text: str) -> bool:
    return len(text) < 2100 and "Traceback" not in text and text.isprintable()


def _place(folder: Path, name: str, content: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def _limit_memory() -> None:
    """An allocation far beyond the bound fails at once, instead of taking the machine's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2 * BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


@contextlib.contextmanager
def _bounded() -> Iterator[dict[str, Any]]:
    used: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, start = _status("VmRSS"), time.process_time()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(BLOCKED_SECONDS)
    yield used
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.alarm(0)
    used["seconds"], used["bytes"] = time.process_time() - start, max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    chosen = [job.rpartition(":") for job in sys.argv[3:]]
    run_child(int(sys.argv[1]), int(sys.argv[2]), [(name, int(first)) for name, _, first in chosen])
