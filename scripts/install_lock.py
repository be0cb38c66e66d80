"""Install a lock file (default: requirements.lock) into the environment of the Python that runs this script, with progress.

The lock names every package, so pip is called with `--no-deps`: no resolver runs, and a release published after the lock cannot
change or break the installation. (With dependencies, pip 23 in hash mode resolves `etils[epath]` to its newest release and stops.)
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


def count_packages(lock: str) -> int:
    """Count the pinned packages in the text of a lock file, including those for other platforms."""
    return len(re.findall(r"^[A-Za-z0-9._-]+(\[[^\]]*\])?==", lock, re.MULTILINE))


def install(lock: Path) -> int:
    """Run pip and return its exit code. Prints one line that counts packages; pip's own output only if it fails."""
    total = count_packages(lock.read_text())
    command = (*PIP, "install", "--no-deps", "--require-hashes", "--progress-bar", "off", "-r", str(lock))
    started, seen, output = time.monotonic(), 0, []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    assert process.stdout is not None
    for line in process.stdout:
        output.append(line)
        if line.startswith(("Collecting ", "Requirement already satisfied: ", "Ignoring ")):
            seen += 1
            _show(lock, f"downloading package {min(seen, total)} of {total}", always=seen % 20 == 0)
        elif line.startswith("Installing collected packages"):
            _show(lock, "unpacking the packages (about a minute)", always=True)
    code = process.wait()
    if code:
        print(f"\n{''.join(output[-40:])}", file=sys.stderr)
        print(
            f"pip could not install {lock}. Fix: see its message above; a package index must be reachable.",
            file=sys.stderr,
        )
    else:
        _show(lock, f"{total} packages in {time.monotonic() - started:.0f} s", always=True, end="\n")
    return code


def _show(lock: Path, text: str, *, always: bool, end: str = "") -> None:
    """Rewrite one line on a terminal; elsewhere (a CI log) print only what is marked `always`, one line each."""
    if sys.stdout.isatty():
        print(f"\rInstalling {lock.name}: {text:<50}", end=end, flush=True)
    elif always:
        print(f"Installing {lock.name}: {text}", flush=True)


def main() -> int:
    lock = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent / "requirements.lock")
    return install(lock)


if __name__ == "__main__":
    sys.exit(main())
