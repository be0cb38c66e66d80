"""Worker side of the preparation: encode one chunk to one shard and its manifest. A shard with a manifest is complete."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int64, Shaped, UInt8

from linnet.core.files import atomic_write
from linnet.data.images import BrokenImage, decode_pixels
from linnet.data.npy_writer import write_array
from linnet.data.prepare.chunks import SPACE, Chunk, ChunkItem
from linnet.tokenizers.base import Tokenizer

_IS_SPACE = np.zeros(256, bool)
_IS_SPACE[list(SPACE)] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardManifest:
    """Contents of one shard, except its table of parts."""

    shard: str
    tokens: int
    sha256: str
    bytes: int
    words: int
    lossy: int
    """Number of parts that the tokenizer cannot decode back exactly."""
    broken: dict[str, int]
    broken_first: str
    """Name of the first broken image, and why it is broken."""


@dataclasses.dataclass(frozen=True)
class TextEncoder:
    tokenizer: Tokenizer

    @property
    def dtype(self) -> str:
        if self.tokenizer.kind == "bytes":
            return "uint8"
        return "uint16" if self.tokenizer.n_vocab <= 2**16 else "uint32"

    def encode(self, item: ChunkItem) -> Shaped[np.ndarray, " n"]:
        if self.tokenizer.kind == "bytes":
            return np.frombuffer(item.data, np.uint8)
        return self.tokenizer.encode(item.data, continues=not item.first).astype(self.dtype)

    def is_lossy(self, item: ChunkItem, content: Shaped[np.ndarray, " n"]) -> bool:
        if self.tokenizer.exact:
            return False
        rules, ids = self.tokenizer.text_rules, content.tolist()
        return (self.tokenizer.decode(ids) if item.first else b"".join(map(rules.id_bytes, ids))) != item.data


@dataclasses.dataclass(frozen=True)
class PixelEncoder:
    size: int
    dtype: str = "uint8"

    def encode(self, item: ChunkItem) -> UInt8[np.ndarray, " n"]:
        return decode_pixels(item.data, self.size).reshape(-1)


def write_shard(chunk: Chunk, encoder: TextEncoder | PixelEncoder, folder: Path, manifests: Path) -> ShardManifest:
    """Encode a chunk, and write its shard to `folder` and its manifest to `manifests`."""
    contents: list[np.ndarray] = []
    parts: list[tuple[int, bool, bool]] = []
    broken: Counter[str] = Counter()
    n_bytes, words, lossy, broken_first = 0, 0, 0, ""
    for item in chunk.items:
        try:
            content = encoder.encode(item)
        except BrokenImage as error:
            broken[str(error)] += 1
            broken_first = broken_first or f"{item.name}: {error}"
            continue
        if isinstance(encoder, TextEncoder):
            n_bytes += len(item.data)
            words += count_words(item.data, item.inside_word)
            lossy += encoder.is_lossy(item, content)
        else:
            n_bytes += content.size
        contents.append(content)
        parts.append((content.size, item.first, item.last))
    tokens = np.concatenate(contents) if contents else np.zeros(0, encoder.dtype)
    file = f"{chunk.name}.bin"
    atomic_write(folder / file, tokens.data)
    write_array(manifests / f"{chunk.name}.npy", np.array(parts, np.int64).reshape(-1, 3))
    manifest = ShardManifest(
        shard=file,
        tokens=tokens.size,
        sha256=hashlib.sha256(tokens.data).hexdigest(),
        bytes=n_bytes,
        words=words,
        lossy=lossy,
        broken=dict(broken),
        broken_first=broken_first,
    )
    atomic_write(manifests / f"{chunk.name}.json", json.dumps(dataclasses.asdict(manifest)).encode())
    return manifest


def read_manifest(name: str, folder: Path, manifests: Path) -> ShardManifest | None:
    """Return the manifest of a shard that an earlier attempt finished."""
    try:
        manifest = ShardManifest(**json.loads((manifests / f"{name}.json").read_bytes()))
        return manifest if (folder / manifest.shard).is_file() and (manifests / f"{name}.npy").is_file() else None
    except (OSError, ValueError, TypeError):
        return None


def read_part_table(
    name: str, manifests: Path
) -> tuple[Int64[np.ndarray, " n"], Bool[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """Return the sizes of a shard's parts, whether a document begins with each, and whether it ends with each."""
    table = np.load(manifests / f"{name}.npy")
    return table[:, 0], table[:, 1].astype(bool), table[:, 2].astype(bool)


def count_words(data: bytes, inside_word: bool = False) -> int:
    """Count words that begin here; with `inside_word` the first letters belong to a word that was already counted."""
    if not data:
        return 0
    letter = ~_IS_SPACE[np.frombuffer(data, np.uint8)]
    begins = np.count_nonzero(letter[1:] & ~letter[:-1])
    return int(begins) + int(letter[0] and not inside_word)
