"""Agreement between the processes of a run on when to stop, save and evaluate.

Signals and clocks differ between processes, but all must act after the same update. Each process contributes its flags at every
update; if any process sets one, all act on it one update later. The reduction is dispatched behind the update and read when the
next one is in flight, so no process waits for it. A single process acts on its own flags at once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from linnet.parallel.mesh import MESH_AXES


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlFlags:
    stop: bool = False
    save: bool = False
    evaluate: bool = False


class ControlSync:
    def __init__(self, mesh: Mesh) -> None:
        self._alone = jax.process_count() == 1
        self._agreed = ControlFlags()
        self._asked: Any = None
        self._rows = NamedSharding(mesh, PartitionSpec(MESH_AXES))
        self._any = jax.jit(lambda x: jnp.max(x, axis=0), out_shardings=NamedSharding(mesh, PartitionSpec()))

    def decide(self, flags: ControlFlags) -> ControlFlags:
        """Return the flags that all processes act on now. Every process calls this after every update."""
        if self._alone:
            self._agreed = flags
            return flags
        self._agreed = (
            ControlFlags() if self._asked is None else ControlFlags(**dict(zip(_FIELDS, self._answer(), strict=True)))
        )
        row = np.asarray([[getattr(flags, name) for name in _FIELDS]], np.int32)
        shape = (self._rows.mesh.size, len(_FIELDS))
        self._asked = self._any(jax.make_array_from_callback(shape, self._rows, lambda _: row))
        return self._agreed

    def stops(self, requested: bool) -> bool:
        """Whether the run stops here. A single process stops as soon as it is requested."""
        return requested if self._alone else self._agreed.stop

    def _answer(self) -> list[bool]:
        return [bool(flag) for flag in np.asarray(self._asked)]


_FIELDS = tuple(field.name for field in dataclasses.fields(ControlFlags))
