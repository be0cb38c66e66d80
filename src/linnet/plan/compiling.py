"""Programs compiled to be read, not run: what the compiler says of them, in the types that the model has."""

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
    cut: str | None
    """The program right after it was cut for its devices; None where there is one device."""
    argument_bytes: int
    output_bytes: int
    """Beyond what reuses the arguments' memory."""
    temporary_bytes: int


def use_fake_devices(n_device: int) -> None:
    """So many devices, of a processor that is there once. To be called before JAX looks for devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", n_device)
    # A program out of the cache was not compiled, and leaves nothing to read.
    jax.config.update("jax_enable_compilation_cache", False)


def compile_for_reading(lowered: Any) -> Compiled:
    """Of a `jax.stages.Lowered`. Nothing is optimised for running, which does not change what is read."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "xla_backend_optimization_level": 0,
            "xla_dump_to": folder,
            "xla_dump_hlo_as_text": True,
            "xla_dump_hlo_pass_re": "spmd-partitioning",
        }
        compiled = lowered.compile(options)
        found = sorted(Path(folder).glob("*after_spmd-partitioning*.txt"))
        cut = found[0].read_text() if found else None
    text = compiled.as_text()
    parts = re.search(r"num_partitions=(\d+)", text)
    assert cut is not None or parts is None or parts[1] == "1", "the program came out of a cache: `pretend` comes first"
    memory = compiled.memory_analysis()
    return Compiled(
        text=text,
        cut=cut,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
    )
