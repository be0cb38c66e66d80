"""What the processes of a run tell each other outside the compiled steps: all call these together, in the same order.

A process on its own is told what it said.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from linnet.core.errors import UserError

T = TypeVar("T")

_ROOM = 1024  # Bytes. Messages are padded to a multiple of it: one compiled program serves nearly all.


def all_gather_json(said: Any) -> list[Any]:
    """What each process says (small and JSON), in the order of the processes."""
    if jax.process_count() == 1:
        return [said]
    text = np.frombuffer(json.dumps(said).encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.int32(text.size))).reshape(-1)
    padded = np.zeros(-(-int(lengths.max()) // _ROOM) * _ROOM, np.uint8)
    padded[: text.size] = text
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(lengths), -1)
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]


def broadcast_from_process0(choose: Callable[[], T]) -> T:
    """What the first process chooses (small and JSON), on every process. If it refuses or fails, so do all.

    For what depends on the disk or the clock: processes that look for themselves may see different things.
    """
    if jax.process_count() == 1:
        return choose()
    if jax.process_index() != 0:
        chosen, refused = all_gather_json(None)[0]
        if refused is not None:
            raise UserError(refused)
        return chosen
    try:
        chosen = choose()
    except Exception as error:
        all_gather_json([None, str(error)])
        raise
    all_gather_json([chosen, None])
    return chosen
