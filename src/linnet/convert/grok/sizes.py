"""Compute the file sizes of Grok-1's release from tensor shapes: the array data, and the pickle overhead around it."""

from __future__ import annotations

import math

from linnet.convert.grok.leaves import specs_by_name
from linnet.convert.grok.names import QUANTIZED, file_order
from linnet.models.moe.config import MoEConfig

GROUPED, N_GROUP = ("layers/w_o", "layers/experts/out"), 8
"""Matrices whose inputs the release shards over its 8 devices, each with scales of its own."""
FRAME, FRAME_HEADER, MIN_FRAME = 64 * 1024, 9, 4  # of pickle: larger values are outside of frames
HEAD = 73  # names of numpy's array constructor, and the call
HEAD_AGAIN = 14  # the same by reference
FLOAT_TYPE, BFLOAT16_TYPE = 48, 52
PAIR = 41  # the pair's name, and the dict of its attributes
ATTRIBUTE = 9  # `weight` or `scales`
TAIL = 4  # closes an array


def scale_groups(leaf: str, n_in: int) -> int:
    return N_GROUP if leaf in GROUPED and n_in % N_GROUP == 0 else 1


def file_sizes(cfg: MoEConfig, n_group: dict[str, int] | None = None) -> list[int]:
    """Return the size of every file of a checkpoint, in order, with each tensor in one shard."""
    specs, sizes = specs_by_name(cfg), list[int]()
    for _, weight, layer in file_order(cfg):
        shape = specs[weight.leaf].shape[0 if layer is None else 1 :]
        groups = None
        if weight.leaf in QUANTIZED:
            groups = scale_groups(weight.leaf, shape[-2]) if n_group is None else n_group[weight.leaf]
        sizes.append(file_size(shape, groups))
    return sizes


def file_size(shape: tuple[int, ...], n_group: int | None) -> int:
    """Return the size of a float32 array, or of an 8-bit pair with `n_group` groups of scales."""
    size = math.prod(shape)
    if n_group is None:
        return _framed_size([HEAD + _state_size(shape) + FLOAT_TYPE + 1, -4 * size, TAIL + 1])
    scales = (*shape[:-2], n_group, shape[-1])
    first = PAIR + ATTRIBUTE + HEAD + _state_size(shape) + FLOAT_TYPE + 1
    second = TAIL + ATTRIBUTE + HEAD_AGAIN + _state_size(scales) + BFLOAT16_TYPE + 1
    return _framed_size([first, -size, second, -2 * math.prod(scales), TAIL + 3])


def _state_size(shape: tuple[int, ...]) -> int:
    """Return the size of a mark, a version, and the shape."""
    numbers = sum(2 if n < 1 << 8 else 3 if n < 1 << 16 else 5 for n in shape)
    return 3 + numbers + (2 if len(shape) <= 3 else 3)


def _framed_size(parts: list[int]) -> int:
    """Return the total size including frames. `parts`: lengths of opcodes, and (negative) of array data.

    A full frame is closed when another value begins; none begins in the last part, which only closes open values.
    """
    total, frame = 2, 0
    for i, part in enumerate(parts):
        if frame >= FRAME and i < len(parts) - 1:
            total, frame = total + _frame_size(frame), 0
        n = -part
        if part < 0:
            header = 2 if n < 1 << 8 else 5 if n < 1 << 32 else 9
            if n >= FRAME:
                total, frame = total + _frame_size(frame) + header + n, 0
                continue
            part = header + n
        frame += part
    return total + _frame_size(frame)


def _frame_size(frame: int) -> int:
    return frame + (FRAME_HEADER if frame >= MIN_FRAME else 0)
