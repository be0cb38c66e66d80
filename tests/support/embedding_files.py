"""Small sets of pairs in every layout, for tests."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

N, TEXT, IMAGE = 23, 5, 7
SIZES = (10, 9, 4)


def vectors(n: int = N, width: int = IMAGE, seed: int = 0) -> np.ndarray:
    """Unit rows of float32."""
    values = np.random.default_rng((seed, width)).normal(size=(n, width)).astype(np.float32)
    return values / np.linalg.norm(values, axis=1, keepdims=True)


def texts() -> np.ndarray:
    return vectors(N, TEXT)


def captions() -> list[str]:
    return [f"caption {i}" for i in range(N)]


def folder(
    root: Path,
    image: np.ndarray | None = None,
    text: np.ndarray | None = None,
    *,
    metadata: bool = True,
    sizes: tuple[int, ...] = SIZES,
    first: int = 8,
    dtype: Any = np.float32,
) -> Path:
    """clip-retrieval's layout, in shards numbered from `first` so that 10 must stand after 9."""
    image, text = vectors() if image is None else image, texts() if text is None else text
    start = 0
    for name in ("img_emb", "text_emb", *(("metadata",) if metadata else ())):
        (root / name).mkdir(parents=True)
    for i, size in enumerate(sizes, first):
        stop = start + size
        np.save(root / "img_emb" / f"img_emb_{i}.npy", image[start:stop].astype(dtype))
        np.save(root / "text_emb" / f"text_emb_{i}.npy", text[start:stop].astype(dtype))
        if metadata:
            table = pa.table(
                {"caption": captions()[start:stop], "image_path": [f"{j}.png" for j in range(start, stop)]}
            )
            pq.write_table(table, root / "metadata" / f"metadata_{i}.parquet", row_group_size=4)
        start = stop
    return root


def parquet(path: Path, **columns: Any) -> Path:
    lists = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in columns.items()}
    pq.write_table(pa.table(lists), path, row_group_size=6)
    return path


def npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def samples(start: int = 0, stop: int = N) -> dict[str, bytes]:
    """Members of a webdataset: embeddings of both kinds, and captions as .txt or, for odd rows, in .json."""
    image, text = vectors(), texts()
    members: dict[str, bytes] = {}
    for i in range(start, stop):
        members[f"{i:05}.img_emb.npy"] = npy(image[i].astype(np.float16))
        members[f"{i:05}.text_emb.npy"] = npy(text[i])
        if i % 2:
            members[f"{i:05}.json"] = json.dumps({"caption": f"caption {i}"}).encode()
        else:
            members[f"{i:05}.txt"] = f"caption {i}\n".encode()
    return members
