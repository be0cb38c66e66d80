"""What the processes of a run decide together while it runs: to stop, to save, to evaluate.

Signals and clocks differ between processes, but all must do the same thing after the same update. So each says with every update what
it would like; whatever one of them wants, all do, after the next update. The question travels behind the update itself and is read
when the next one is on its way: nobody waits for it. A process on its own does what it likes at once.
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
    judge: bool = False


class ControlSync:
    def __init__(self, mesh: Mesh) -> None:
        self._alone = jax.process_count() == 1
        self._agreed = ControlFlags()
        self._asked: Any = None
        self._rows = NamedSharding(mesh, PartitionSpec(MESH_AXES))
        self._any = jax.jit(lambda x: jnp.max(x, axis=0), out_shardings=NamedSharding(mesh, PartitionSpec()))

    def decide(self, wish: ControlFlags) -> ControlFlags:
        """After every update, by every process: what all do now."""
        if self._alone:
            self._agreed = wish
            return wish
        self._agreed = (
            ControlFlags() if self._asked is None else ControlFlags(**dict(zip(_FIELDS, self._answer(), strict=True)))
        )
        row = np.asarray([[getattr(wish, name) for name in _FIELDS]], np.int32)
        shape = (self._rows.mesh.size, len(_FIELDS))
        self._asked = self._any(jax.make_array_from_callback(shape, self._rows, lambda _: row))
        return self._agreed

    def stops(self, requested: bool) -> bool:
        """Whether this is the end: of a process on its own, when it was asked to."""
        return requested if self._alone else self._agreed.stop

    def _answer(self) -> list[bool]:
        return [bool(flag) for flag in np.asarray(self._asked)]


_FIELDS = tuple(field.name for field in dataclasses.fields(ControlFlags))
