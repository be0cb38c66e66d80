"""Read and write Flax msgpack checkpoints without Flax: nested dicts whose arrays are msgpack extension types.

Written files are byte-identical to those of `flax.serialization.msgpack_serialize`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgpack
import numpy as np

from linnet.core.errors import UserError
from linnet.core.files import atomic_write

NDARRAY, COMPLEX, SCALAR = 1, 2, 3
CHUNKED = "__msgpack_chunked_array__"
CHUNK_BYTES = 2**30
"""Flax splits larger arrays: a msgpack entry holds less than 4 GB."""
# bfloat16 is not a numpy type. Other types (objects, text) are never weights.
DTYPES = {
    name: np.dtype(name)
    for name in [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
} | {"bfloat16": np.dtype(jnp.bfloat16)}


def read_flax(path: Path) -> dict[str, Any]:
    """Return the nested dict as it was saved. Nothing is executed, and allocation is bounded by the file size."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist. Fix: check the path.") from None
    except IsADirectoryError:
        raise UserError(
            f"{path} is a folder, not a msgpack file. Fix: name the checkpoint file in it (as in checkpoint_1000)."
        ) from None
    try:
        tree = msgpack.unpackb(data, ext_hook=_unpack_extension, raw=False, strict_map_key=True)
        tree = _join_chunks(tree, "")
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise UserError(f"{path} is not a complete Flax msgpack file ({error}). Fix: copy it again.") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds {type(tree).__name__}, not a tree of weights. Fix: name the checkpoint file.")
    return tree


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """Return the arrays of a nested dict by '/'-joined names; other values (empty options) are dropped."""
    flat: dict[str, np.ndarray] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}/")
        elif isinstance(value, np.ndarray):
            flat[f"{prefix}{name}"] = value
    return flat


def _unpack_extension(code: int, data: bytes) -> Any:
    if code in (NDARRAY, SCALAR):
        array = _unpack_array(data)
        return array[()] if code == SCALAR else array
    if code == COMPLEX:
        real, imaginary = msgpack.unpackb(data)
        return complex(real, imaginary)
    raise ValueError(f"unknown extension type {code}")


def _unpack_array(data: bytes) -> np.ndarray:
    parts = msgpack.unpackb(data, raw=False)
    if not (isinstance(parts, list) and len(parts) == 3):
        raise ValueError("an array is not (shape, dtype, bytes)")
    shape, name, body = parts
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"an array of type {name!r}")
    if not (isinstance(shape, list) and all(isinstance(n, int) and n >= 0 for n in shape) and isinstance(body, bytes)):
        raise ValueError("an array whose shape is not a list of sizes")
    if math.prod(shape) * DTYPES[name].itemsize != len(body):
        raise ValueError(f"an array of shape {tuple(shape)} and type {name} with {len(body)} bytes")
    return np.frombuffer(body, DTYPES[name]).reshape(shape)


def _join_chunks(node: Any, where: str) -> Any:
    """Join arrays too large for one msgpack entry, stored as flat chunks and a shape, both dicts with the keys "0", "1", .."""
    if not isinstance(node, dict):
        return node
    if CHUNKED not in node:
        return {str(name): _join_chunks(value, f"{where}/{name}") for name, value in node.items()}
    shape, chunks = _ordered_values(node.get("shape"), where), _ordered_values(node.get("chunks"), where)
    if not chunks or not all(isinstance(c, np.ndarray) for c in chunks) or not all(isinstance(n, int) for n in shape):
        raise ValueError(f"{where} is a chunked array without its chunks")
    if sum(c.size for c in chunks) != math.prod(shape):
        raise ValueError(f"{where} has chunks that do not make up its shape {tuple(shape)}")
    return np.concatenate([c.reshape(-1) for c in chunks]).reshape(shape)


def _ordered_values(items: Any, where: str) -> list[Any]:
    if not isinstance(items, dict) or set(items) != {str(i) for i in range(len(items))}:
        raise ValueError(f"{where} is a chunked array with a piece missing")
    return [items[str(i)] for i in range(len(items))]


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
    packed = msgpack.packb(_to_packable(tree, chunk_bytes), use_bin_type=True, strict_types=True)
    assert packed is not None
    return packed


def write_flax(path: Path, tree: Mapping[str, Any]) -> None:
    """Write the file atomically."""
    atomic_write(path, pack_flax(tree), sync=True)


def _to_packable(node: Any, chunk_bytes: int) -> Any:
    if isinstance(node, Mapping):
        return {name: _to_packable(node[name], chunk_bytes) for name in sorted(node)}
    array = np.asarray(node)
    if array.nbytes <= chunk_bytes:
        return _pack_array(array)
    flat, n = array.reshape(-1), max(1, chunk_bytes // array.itemsize)
    pieces = [flat[i : i + n] for i in range(0, flat.size, n)]
    return {
        CHUNKED: True,
        "shape": {str(i): size for i, size in enumerate(array.shape)},
        "chunks": {str(i): _pack_array(piece) for i, piece in enumerate(pieces)},
    }


def _pack_array(array: np.ndarray) -> msgpack.ExtType:
    body = msgpack.packb((array.shape, array.dtype.name, array.tobytes("C")), use_bin_type=True)
    assert body is not None
    return msgpack.ExtType(NDARRAY, body)
