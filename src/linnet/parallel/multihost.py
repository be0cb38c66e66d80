"""Host-level communication between the processes of a run. All processes must make the same calls in the same order.

With a single process, each function returns its own input.
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

_ROOM = 1024  # Bytes. Messages are padded to a multiple of it, so that one compiled program serves nearly all.


def is_process0() -> bool:
    """Whether this is process 0, which writes the files of a run."""
    return jax.process_index() == 0


def all_gather_json(value: Any) -> list[Any]:
    """Gather a small JSON value from each process, in order of process index."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.int32(text.size))).reshape(-1)
    padded = np.zeros(-(-int(lengths.max()) // _ROOM) * _ROOM, np.uint8)
    padded[: text.size] = text
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(lengths), -1)
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]


def broadcast_from_process0(choose: Callable[[], T]) -> T:
    """Evaluate `choose` on process 0 and return its result (a small JSON value) on every process. An exception is raised on all.

    Use it for decisions that depend on the disk or the clock, which processes may see differently.
    """
    if jax.process_count() == 1:
        return choose()
    if not is_process0():
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
