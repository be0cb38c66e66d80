"""Mesh specifications such as `data=2,model=4`. Does not import JAX, so that a config can be validated before JAX is loaded.

There are four axes, each of size 1 by default. Batch rows are sharded over data, fsdp and expert together. Weights are sharded over
fsdp (each device stores a shard and all-gathers the rest when a layer needs it), model (heads, values, hidden units, vocabulary)
and expert.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from linnet.core.errors import invalid

MESH_AXES = ("data", "fsdp", "model", "expert")
BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes over which batch rows are sharded."""


def parse_mesh(text: str) -> dict[str, int]:
    """Return the sizes of all mesh axes."""
    sizes: dict[str, int] = dict.fromkeys(MESH_AXES, 1)
    given: set[str] = set()
    for part in filter(None, (word.strip() for word in text.split(","))):
        name, equals, size = part.partition("=")
        name = name.strip()
        if name not in MESH_AXES:
            raise invalid("mesh", text, f"axes among {', '.join(MESH_AXES)}", "write it as --mesh data=2,model=2")
        if name in given:
            raise invalid("mesh", text, f"the axis {name} once", "leave one of them out")
        if not equals or not size.strip().isdecimal() or int(size) < 1:
            needs = f"a whole number from 1 on as the size of {name}"
            raise invalid("mesh", text, needs, f"write it as --mesh {name}=2, or leave {name} out for 1")
        given.add(name)
        sizes[name] = int(size)
    return sizes


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Format a mesh without its axes of size 1; an empty string is one device."""
    return ",".join(f"{name}={sizes[name]}" for name in MESH_AXES if sizes.get(name, 1) > 1)


def n_devices(sizes: Mapping[str, int]) -> int:
    return math.prod(sizes.values())


def data_parallel_size(sizes: Mapping[str, int]) -> int:
    """Return the number of shards of the batch axis."""
    return math.prod(sizes[name] for name in BATCH_AXES)


def check_divides(field: str, value: int, axis: str, sizes: Mapping[str, int]) -> None:
    """Raise if the mesh axis does not divide the dimension that it shards."""
    size = sizes[axis]
    if value % size:
        fitting = max(n for n in range(1, size + 1) if value % n == 0)
        needs = f"a size that divides {field} ({value}), which the axis shards"
        raise invalid(f"mesh axis {axis}", size, needs, f"use --mesh {axis}={fitting}, or another {field}")


def check_no_experts(sizes: Mapping[str, int]) -> None:
    """Raise if the mesh has an expert axis; for models without experts."""
    if sizes["expert"] > 1:
        needs = "1 for a model without experts"
        raise invalid("mesh axis expert", sizes["expert"], needs, "leave it out, or use data or fsdp instead")
