"""Two runs that must be the same: their states to the bit, their metrics to the figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from linnet.core.pytree import named_leaves
from linnet.runs.metrics import read_metrics


def assert_same_bits(a: Any, b: Any) -> None:
    left, right = dict(named_leaves(a)), dict(named_leaves(b))
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert np.asarray(value).tobytes() == np.asarray(right[name]).tobytes(), f"{name} differs"


def lines(run: Path) -> list[dict[str, Any]]:
    """Metrics without what depends on the clock or the machine."""
    clock = {"time", "tokens_per_second", "tracking/samples-sec", "mfu", "wait_share", "rss_bytes"}
    return [{k: v for k, v in r.items() if k not in clock} for r in read_metrics(run) if r["kind"] != "event"]
