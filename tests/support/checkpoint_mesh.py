"""A state on a mesh, of one process or several, for the tests of checkpoints that move between meshes.

Such processes are children of the test: how many devices and processes there are is settled when JAX starts.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from compiler_flags import simulated
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "model", "expert")


def alone(devices: int, script: str, *arguments: str, timeout: float = 120) -> list[Any]:
    """What a Python script prints, as JSON by lines, in a process of its own that sees so many devices."""
    found = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=_environment(devices),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines() if line[:1] in "[{"]


def cluster(processes: int, script: str, *arguments: str, timeout: float = 120) -> list[tuple[int, list[Any], str]]:
    """Runs a script in processes of one device each that form a cluster: exit code, what was printed, complaints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    joined = f"import checkpoint_mesh; checkpoint_mesh.join({address!r}, {processes}, %d)\n"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", joined % i + script, *arguments],
            env=_environment(1),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]
    try:
        ends = [child.communicate(timeout=timeout) for child in children]
    finally:
        for child in children:
            child.kill()
    output = [
        [json.loads(line) for line in out.splitlines() if line[:1] in "[{" and "Gloo" not in line] for out, _ in ends
    ]
    return [(child.returncode, words, err) for child, words, (_, err) in zip(children, output, ends, strict=True)]


def _environment(devices: int) -> dict[str, str]:
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return simulated(devices, quickly=False) | {"PYTHONPATH": os.pathsep.join(paths)}


def join(address: str, processes: int, index: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, processes, index, heartbeat_timeout_seconds=10)


def on_mesh(**sizes: int) -> Mesh:
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 4, devices=jax.devices()[: math.prod(shape)])


def expected(seed: int) -> dict[str, np.ndarray]:
    """Leaves that meshes cut in all ways, also within a word of the checksum, and values that inexact ways would lose."""
    rng = np.random.default_rng(seed)
    odd = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000001, 0x7F800000, 0, 1, seed], np.uint32)
    return {
        "step": np.array(seed, np.int32),
        "empty": np.zeros((0, 4), np.float32),
        "odd": odd.view(np.float32),
        "kernel": rng.standard_normal((64, 48), np.float32),
        "halves": rng.integers(0, 2**16, (4, 8, 24), np.uint16).view(jnp.bfloat16),
        "bytes": rng.integers(-128, 128, (16, 24), np.int8),
        "long": rng.standard_normal(40_000, np.float32),
        "large": rng.standard_normal((16, 512, 384), np.float32),  # 12 MB.
        "keys": rng.integers(0, 2**32, (8, 2), np.uint32),
    }


def _shardings(mesh: Any) -> dict[str, NamedSharding]:
    """Cuts the last axes first. What a mesh axis does not divide stays whole; `data` cuts nothing: it makes copies."""

    def one(shape: tuple[int, ...]) -> NamedSharding:
        axes = zip(reversed(shape), ("model", "fsdp", "expert"), strict=False)
        splits = [name if size and size % mesh.shape[name] == 0 else None for size, name in axes]
        return NamedSharding(mesh, PartitionSpec(*[None] * (len(shape) - len(splits)), *reversed(splits)))

    shapes = {name: leaf.shape for name, leaf in expected(0).items()} | {"keys": (8,)}
    return {name: one(shape) for name, shape in shapes.items()}


def target(mesh: Any) -> dict[str, jax.ShapeDtypeStruct]:
    made = expected(0)
    kinds = {name: (leaf.shape, leaf.dtype) for name, leaf in made.items()} | {"keys": ((8,), jax.random.key(0).dtype)}
    places = _shardings(mesh)
    return {name: jax.ShapeDtypeStruct(*kind, sharding=places[name]) for name, kind in kinds.items()}


def state(seed: int, mesh: Any) -> dict[str, Any]:
    places = _shardings(mesh)
    made = {
        name: jax.make_array_from_callback(leaf.shape, places[name], lambda splits, leaf=leaf: leaf[splits])
        for name, leaf in expected(seed).items()
    }
    return made | {"keys": jax.random.wrap_key_data(made["keys"])}


def same(tree: Any, seed: int) -> bool:
    """Whether all that this process holds is what it must be, bit for bit."""
    full, held = expected(seed), tree | {"keys": jax.random.key_data(tree["keys"])}
    return held.keys() == full.keys() and all(
        np.asarray(shard.data).tobytes() == full[name][shard.index].tobytes()
        for name, leaf in held.items()
        for shard in leaf.addressable_shards
    )


def flip_a_byte(step: Path) -> None:
    needle = expected(int(step.name))["large"][-1, -1, -8:].tobytes()
    holder = next(path for path in sorted(step.rglob("d/*")) if needle in path.read_bytes())
    content = bytearray(holder.read_bytes())
    content[content.index(needle) + 2] ^= 0x40
    holder.write_bytes(content)


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)
