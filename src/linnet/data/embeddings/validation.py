"""Validate every row once: unusable rows are excluded and reported, and the content is hashed.

The result for a file is cached until the file changes, so a large set is read completely only once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from linnet.core.errors import UserError
from linnet.core.files import atomic_write, cache_folder
from linnet.data.embeddings.vectors import Vectors, VectorShard
from linnet.data.sources.files import reading

VERSION = 2
BLOCK_BYTES = 8 << 20
NAMED_ROWS = 3
"""Number of bad rows named in a warning; the others are only counted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardScan:
    """Result for one shard."""

    not_finite: list[int]
    overflow: list[int]
    """Rows that are finite in the file's float64 but overflow float32."""
    zero: list[int]
    mean_length: float
    """Mean norm of the good rows."""
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationResult:
    """Result for all shards of one kind."""

    bad_rows: Int64[np.ndarray, " bad"]
    left_out: dict[str, int]
    mean_length: float
    sha256: str
    warnings: list[str]


def validate_rows(vectors: Vectors, what: str, *, padded: bool = False) -> ValidationResult:
    """Validate all shards. `padded`: rows of zeros are padding, not errors (text encodings)."""
    scans = [_cached_scan(shard) for shard in vectors.shards]
    bad: dict[str, list[int]] = {"not_finite": [], "overflow": [], "zero": []}
    for start, result in zip(vectors.starts.tolist(), scans, strict=False):
        bad["not_finite"] += [start + row for row in result.not_finite]
        bad["overflow"] += [start + row for row in result.overflow]
        bad["zero"] += [] if padded else [start + row for row in result.zero]
    descriptions = {
        "not_finite": "contain NaN or infinity",
        "overflow": "contain numbers too large for float32 (beyond 3.4e38)",
        "zero": "are all zeros",
    }
    warnings = [
        f"{len(rows):,} of {vectors.n_rows:,} {what} embeddings {descriptions[reason]} and are left out: {_list_rows(vectors, rows)}."
        for reason, rows in bad.items()
        if rows
    ]
    n_bad = [len(result.not_finite) + len(result.overflow) + len(result.zero) for result in scans]
    sizes = np.array([shard.n_rows - n for shard, n in zip(vectors.shards, n_bad, strict=True)])
    lengths = np.array([result.mean_length for result in scans])
    digest = hashlib.sha256(json.dumps([[list(vectors.shape)], *([result.sha256] for result in scans)]).encode())
    return ValidationResult(
        bad_rows=np.array(sorted(row for rows in bad.values() for row in rows), np.int64),
        left_out=dict(Counter({f"{what}_{reason}": len(rows) for reason, rows in bad.items() if rows})),
        mean_length=float((sizes * lengths).sum() / max(1, sizes.sum())),
        sha256=digest.hexdigest(),
        warnings=warnings,
    )


def _list_rows(vectors: Vectors, rows: list[int]) -> str:
    more = f" and {len(rows) - NAMED_ROWS:,} more" if len(rows) > NAMED_ROWS else ""
    return "; ".join(vectors.row_name(row) for row in rows[:NAMED_ROWS]) + more


def _cached_scan(shard: VectorShard) -> ShardScan:
    path = _cache_path(shard)
    with contextlib.suppress(OSError, ValueError, TypeError):
        return ShardScan(**json.loads(path.read_text()))
    result = _scan_shard(shard)
    # If the cache is not writable, the shard is only scanned again the next time.
    with contextlib.suppress(UserError):
        atomic_write(path, json.dumps(dataclasses.asdict(result)).encode())
    return result


def _cache_path(shard: VectorShard) -> Path:
    with reading(shard.path):
        info = shard.path.stat()
    key: list[Any] = [VERSION, str(shard.path.absolute()), shard.identity, info.st_size, info.st_mtime_ns, info.st_ino]
    return cache_folder() / "pairs" / "scans" / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()}.json"


def _scan_shard(shard: VectorShard) -> ShardScan:
    digest = hashlib.sha256()
    not_finite: list[int] = []
    overflow: list[int] = []
    zero: list[int] = []
    total, n_good = 0.0, 0
    n_values = int(np.prod(shard.shape))
    rows = max(1, BLOCK_BYTES // (4 * n_values))
    for start in range(0, shard.n_rows, rows):
        with reading(shard.path):
            block = np.ascontiguousarray(shard.read_stored(slice(start, min(start + rows, shard.n_rows))))
        digest.update(str(block.dtype).encode() + block.tobytes())
        flat = block.reshape(len(block), -1)
        with np.errstate(over="ignore"):
            values = flat.astype(np.float32)  # the values that training reads
        finite = np.asarray(np.isfinite(values).all(1))
        too_large = ~finite & np.asarray(np.isfinite(flat).all(1))
        # In float64, where the square of a finite float32 is finite and that of a tiny one is not zero.
        squares = (np.where(finite[:, None], values, 0).astype(np.float64) ** 2).sum(1)
        empty = finite & (squares == 0)
        not_finite += (start + np.flatnonzero(~finite & ~too_large)).tolist()
        overflow += (start + np.flatnonzero(too_large)).tolist()
        zero += (start + np.flatnonzero(empty)).tolist()
        good = finite & ~empty
        total += float(np.sqrt(squares[good]).sum())
        n_good += int(good.sum())
    return ShardScan(
        not_finite=not_finite,
        overflow=overflow,
        zero=zero,
        mean_length=total / max(1, n_good),
        sha256=digest.hexdigest(),
    )
