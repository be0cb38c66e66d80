"""Compile programs for analysis, without running them."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from pathlib import Path
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    text: str
    partitioned_hlo: str | None
    """HLO after SPMD partitioning, before CPU-specific passes; None with one device."""
    argument_bytes: int
    output_bytes: int
    """Outputs that do not alias an argument."""
    temporary_bytes: int


def use_fake_devices(n_device: int) -> None:
    """Make JAX expose `n_device` fake CPU devices. Call this before JAX initializes its backends."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", n_device)
    # A cached program is not compiled, so it would not dump its HLO.
    jax.config.update("jax_enable_compilation_cache", False)


def compile_for_reading(lowered: Any) -> Compiled:
    """Compile a `jax.stages.Lowered` and return its HLO and memory analysis. Backend optimizations are off; they do not change it."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "xla_backend_optimization_level": 0,
            "xla_dump_to": folder,
            "xla_dump_hlo_as_text": True,
            "xla_dump_hlo_pass_re": "spmd-partitioning",
        }
        compiled = lowered.compile(options)
        dumps = sorted(Path(folder).glob("*after_spmd-partitioning*.txt"))
        partitioned_hlo = dumps[0].read_text() if dumps else None
    text = compiled.as_text()
    parts = re.search(r"num_partitions=(\d+)", text)
    assert partitioned_hlo is not None or parts is None or parts[1] == "1", (
        "the program came from a compilation cache: call `use_fake_devices` first"
    )
    memory = compiled.memory_analysis()
    return Compiled(
        text=text,
        partitioned_hlo=partitioned_hlo,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
    )
