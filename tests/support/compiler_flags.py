"""How tests have their programs compiled.

Compiling takes most of their time, and most of them ask what a program does, not how exactly it was compiled: `pytest --quickly`
leaves out what the compiler would do to make it fast. What is promised of the very programs that users run (bits that do not
depend on neighbours, parity with the references) is marked `optimized`, and compiled as theirs are.
"""

from __future__ import annotations

import os

QUICKLY = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false"
)
"""XLA_FLAGS for a quarter of the time."""


def simulated(n_device: int, *, quickly: bool) -> dict[str, str]:
    """The environment of a process with so many devices; one that is not for being quick is compiled as its parent is."""
    how = QUICKLY if quickly else os.environ.get("XLA_FLAGS", "")
    return {
        **os.environ,
        "XLA_FLAGS": f"{how} --xla_force_host_platform_device_count={n_device}",
        "JAX_PLATFORMS": "cpu",
    }
