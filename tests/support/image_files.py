"""Images of noise, and every kind of source that holds them, for the tests of `linnet.data.sources.images` and `pixels`."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from linnet.data.images import to_png
from linnet.data.sources.images import open_images


def png(seed: int, size: int = 8) -> bytes:
    return to_png(noise(seed, size))


def noise(seed: int, height: int = 8, width: int | None = None) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width or height, 3), np.uint8)


IMAGES = {f"{name}.png": png(i) for i, name in enumerate(("b/2", "a/1", "a/10", "c", "a/2"))}
IN_ORDER = ["a/1.png", "a/10.png", "a/2.png", "b/2.png", "c.png"]


def write_folder(path: Path, members: dict[str, bytes]) -> Path:
    for name, data in members.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def write_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def write_parquet(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=3)
    return path


def contents(source: Path, **options: Any) -> list[tuple[str, bytes]]:
    return [(image.name, image.encoded) for image in open_images(str(source), **options).images()]


def flipped(data: bytes, flips: list[tuple[float, int]]) -> bytes:
    damaged = bytearray(data)
    for where, value in flips:
        damaged[int(where * (len(damaged) - 1))] = value
    return bytes(damaged)
