"""The environment of a run: versions, processor, memory and devices. Contains nothing that identifies a machine or a person."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from linnet.core.version import __version__

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # mallopt options from malloc.h

PACKAGES = ("jax", "jaxlib", "numpy", "optax", "orbax-checkpoint")


def describe() -> dict[str, Any]:
    """Return the environment as JSON values, to put the run's metrics in context."""
    import jax

    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    versions = {"linnet": __version__, **{name: _version(name) for name in PACKAGES}}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "git_commit": git_commit(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores_usable": cores_usable(),
        "memory_bytes": memory_bytes(),
        "devices": {"backend": jax.default_backend(), "count": len(devices), "kinds": kinds},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """Return the git commit of the checkout this package runs from, with `+changes` if files differ; None when installed."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists() or not (root / "pyproject.toml").exists():
        return None
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if changed else commit


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def cpu_model() -> str | None:
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Processor")))
    return next(names, None) or platform.processor() or None


def cores_usable() -> int:
    """Number of cores this process may run on, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Memory this process may use: the machine's, or the container's limit if lower."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = "max"
    return min(total, int(limit)) if limit.isdigit() else total


def rss_bytes() -> int:
    """Resident memory of this process; its peak if the system does not report the current value."""
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_rss_bytes()
    return resident * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes() -> int:
    """Peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def give_back_memory() -> None:
    """Return freed memory to the system (glibc only). Compilation leaves about 200 MB of it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def keep_memory() -> None:
    """Make malloc keep large buffers between updates instead of returning them to the system (glibc only).

    Otherwise each buffer is mapped again and its pages are zeroed, which takes a fifth of an update's time. Call before JAX starts its
    threads.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1)):
            mallopt(option, value)
