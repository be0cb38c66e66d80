"""Write a Flax msgpack checkpoint without Flax, byte-identical to `flax.serialization.msgpack_serialize`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from linnet.convert.flax import CHUNKED, NDARRAY
from linnet.core.files import atomic_write

CHUNK_BYTES = 2**30
"""Flax splits larger arrays: a msgpack entry holds less than 4 GB."""


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Convert '/'-joined names to nested dicts."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *folders, last = name.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = value
    return tree


def pack_flax(tree: Mapping[str, Any], chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """Pack nested dicts of arrays. Names are sorted, as in Flax."""
    packed = msgpack.packb(_packable(tree, chunk_bytes), use_bin_type=True, strict_types=True)
    assert packed is not None
    return packed


def write_flax(path: Path, tree: Mapping[str, Any]) -> None:
    """Write the file atomically."""
    atomic_write(path, pack_flax(tree), sync=True)


def _packable(node: Any, chunk_bytes: int) -> Any:
    if isinstance(node, Mapping):
        return {name: _packable(node[name], chunk_bytes) for name in sorted(node)}
    array = np.asarray(node)
    if array.nbytes <= chunk_bytes:
        return _array(array)
    flat, n = array.reshape(-1), max(1, chunk_bytes // array.itemsize)
    pieces = [flat[i : i + n] for i in range(0, flat.size, n)]
    return {
        CHUNKED: True,
        "shape": {str(i): size for i, size in enumerate(array.shape)},
        "chunks": {str(i): _array(piece) for i, piece in enumerate(pieces)},
    }


def _array(array: np.ndarray) -> msgpack.ExtType:
    body = msgpack.packb((array.shape, array.dtype.name, array.tobytes("C")), use_bin_type=True)
    assert body is not None
    return msgpack.ExtType(NDARRAY, body)
