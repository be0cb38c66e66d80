"""Memory that training frees in every update stays with the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOOP = """
import ctypes, resource, sys, threading
from linnet.train.environment import give_back_memory, keep_freed_memory, rss_bytes
if sys.argv[1] == "kept":
    keep_freed_memory()
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
c.free.argtypes, c.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def use():
    block = c.malloc(200 << 20)
    c.memset(block, 1, 200 << 20)
    c.free(block)
def several():
    use()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        use()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
thread = threading.Thread(target=several)
thread.start()
thread.join()
give_back_memory()
print(rss_bytes())
"""


def figures(how: str) -> tuple[int, int]:
    """Page faults of three uses of 200 MB in a thread, and what is held when it was given back."""
    done = subprocess.run([sys.executable, "-c", LOOP, how], capture_output=True, text=True, check=True)
    faults, held = map(int, done.stdout.split())
    return faults, held


@pytest.mark.skipif(sys.platform != "linux", reason="the C library's own way")
def test_large_blocks_are_not_cleared_anew_and_can_still_be_given_back() -> None:
    kept, held = figures("kept")
    assert kept < 100 < figures("usual")[0]
    assert held < 150 << 20
