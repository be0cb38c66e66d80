"""Prepared data on disk: shards of content, a document table per split, and `index.json`, which describes them.

The index is written last and atomically, so a folder that has one is complete; checksums detect later damage.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, Shaped

from linnet.core.errors import UserError
from linnet.core.files import atomic_write, parse_json
from linnet.data.packed import ConcatArray, PackedSplit
from linnet.data.sources.files import reading
from linnet.data.sources.npy import map_npy
from linnet.data.splits import SPLITS
from linnet.tokenizers.base import Tokenizer
from linnet.tokenizers.load import open_tokenizer

FORMAT, VERSION = "linnet-data", 1
INDEX = "index.json"
MAX_CHECKED_BYTES = 256 << 20
"""Data up to this size has its checksums verified whenever it is opened; `linnet data check` verifies any size."""
DTYPES = ("uint8", "uint16", "uint32", "int32")
"""Allowed dtypes of stored ids."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenShard:
    file: str
    tokens: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitIndex:
    segments: list[list[int]]
    """[shard, first token, token after the last] of each segment, in order."""
    documents: str
    """A .npy of [size in tokens, 1 if an EOS id follows], one row per document."""
    documents_sha256: str
    n_documents: int
    tokens: int
    """Tokens of content, without EOS ids, which are not stored."""
    bytes: int
    words: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
    kind: str
    """text or pixels."""
    dtype: str
    first_id: int
    """Offset added to a stored value to make it an id."""
    shape: list[int] | None
    """Image shape: height, width, channels."""
    tokenizer: dict[str, Any]
    source: dict[str, Any]
    shards: list[TokenShard]
    splits: dict[str, SplitIndex]
    held_out: str
    """Description of how validation and test were chosen."""
    left_out: dict[str, int]
    lossy_documents: int
    """Documents that the tokenizer cannot decode back byte for byte."""

    def save(self, folder: Path) -> None:
        text = json.dumps({"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}, indent=1) + "\n"
        atomic_write(folder / INDEX, text.encode())

    @property
    def n_bytes_on_disk(self) -> int:
        return sum(shard.tokens for shard in self.shards) * np.dtype(self.dtype).itemsize


def is_prepared(folder: Path) -> bool:
    try:
        return (folder / INDEX).is_file()
    except (OSError, ValueError):  # an inaccessible folder or a NUL character: reported elsewhere
        return False


def load(folder: Path) -> Index:
    path = folder / INDEX
    with reading(path):
        text = path.read_text(errors="replace")
    try:
        fields = parse_json(text)
        if fields.pop("format") != FORMAT:
            raise KeyError("format")
        version = fields.pop("version")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise UserError(
            f"{path} is not an index of prepared data. Fix: prepare it again with `linnet data prepare`."
        ) from None
    if version != VERSION:
        raise UserError(
            f"{path} has version {version}, and this Linnet reads version {VERSION}. Fix: prepare the data again with "
            "`linnet data prepare`, or use the Linnet that made it."
        )
    try:
        shards = [TokenShard(**shard) for shard in fields.pop("shards")]
        splits = {name: SplitIndex(**split) for name, split in fields.pop("splits").items()}
        index = Index(shards=shards, splits=splits, **fields)
        _check(index)
        return index
    except UserError:
        raise
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise UserError(
            f"{path} is damaged ({error}). Fix: prepare the data again with `linnet data prepare`."
        ) from None


def _check(index: Index) -> None:
    """Check types and ranges, because the file may be damaged or untrusted; names in it must not leave its folder."""
    tokenizer, shape = index.tokenizer, index.shape
    _require(index.kind in ("text", "pixels") and index.dtype in DTYPES, "its kind or its dtype is unknown")
    _require(_is_count(index.first_id) and isinstance(index.source, dict), "its first_id or its source is invalid")
    _require(
        shape is None or (isinstance(shape, list) and len(shape) == 3 and all(_is_count(n) and n for n in shape)),
        "its shape is not height, width and channels",
    )
    _require(
        isinstance(tokenizer, dict)
        and all(_is_count(tokenizer.get(name)) for name in ("n_vocab", "end_id"))
        and all(isinstance(tokenizer.get(name), str) for name in ("kind", "fingerprint")),
        "its tokenizer is not described",
    )
    _require(
        isinstance(index.held_out, str) and isinstance(index.left_out, dict),
        "it does not describe held-out or skipped files",
    )
    for shard in index.shards:
        _require(_is_plain_name(shard.file) and _is_count(shard.tokens), "a shard is not described")
    _require(set(index.splits) == set(SPLITS), f"its splits are not {', '.join(SPLITS)}")
    for split in index.splits.values():
        counts = (split.n_documents, split.tokens, split.bytes, 0 if split.words is None else split.words)
        _require(_is_plain_name(split.documents) and all(map(_is_count, counts)), "a split is not described")
        _require(
            isinstance(split.segments, list) and all(_is_segment(segment, index.shards) for segment in split.segments),
            "a part of a split is outside the shards",
        )


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is_plain_name(value: object) -> bool:
    return isinstance(value, str) and value not in ("", ".", "..") and "/" not in value and "\0" not in value


def _is_segment(value: object, shards: list[TokenShard]) -> bool:
    if not isinstance(value, list) or len(value) != 3 or not all(map(_is_count, value)):
        return False
    shard, start, stop = value
    return shard < len(shards) and start <= stop <= shards[shard].tokens


def open_split(folder: Path, index: Index, name: str, sequence_len: int) -> PackedSplit:
    split = index.splits[name]
    table = _documents(folder, split)
    return PackedSplit(
        ConcatArray([_map(folder, index, shard)[start:stop] for shard, start, stop in split.segments]),
        table[:, 0],
        table[:, 1].astype(bool),
        sequence_len,
        first_id=index.first_id,
        eos_id=index.tokenizer["end_id"],
        n_bytes=split.bytes,
        n_words=split.words,
        fingerprint=fingerprint(index, name),
    )


def fingerprint(index: Index, name: str) -> str:
    """Return the hash of a split, from the checksums of its parts."""
    split = index.splits[name]
    parts = [[index.shards[shard].sha256, start, stop] for shard, start, stop in split.segments]
    identity = [index.kind, index.dtype, index.first_id, index.tokenizer["fingerprint"], split.documents_sha256, parts]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def load_tokenizer(folder: Path, index: Index) -> Tokenizer:
    """Return the tokenizer that the data was made with, which is saved beside it."""
    tokenizer = open_tokenizer(str(folder))
    if tokenizer.fingerprint != index.tokenizer["fingerprint"]:
        raise UserError(
            f"the tokenizer in {folder} is not the one this data was made with. Fix: restore the file, or prepare again."
        )
    return tokenizer


def find_problems(folder: Path, index: Index, *, checksums: bool) -> list[str]:
    """Return the problems of the files as sentences; without `checksums` only sizes are compared."""
    messages: list[str] = []
    for shard in index.shards:
        size = shard.tokens * np.dtype(index.dtype).itemsize
        messages += _file_problems(folder / shard.file, size, shard.sha256 if checksums else None)
    for name, split in index.splits.items():
        path = folder / split.documents
        damage = _file_problems(path, None, split.documents_sha256)
        messages += damage
        if damage:
            continue
        table = _documents(folder, split)
        if len(table) != split.n_documents or table[:, 0].sum() != split.tokens:
            messages.append(f"{path}: its documents do not add up to the {split.tokens:,} tokens of {name}")
        if sum(stop - start for _, start, stop in split.segments) != split.tokens:
            messages.append(f"{folder / INDEX}: the parts of {name} do not add up to its {split.tokens:,} tokens")
    return messages


def check_files(folder: Path, index: Index) -> None:
    damage = find_problems(folder, index, checksums=index.n_bytes_on_disk <= MAX_CHECKED_BYTES)
    if damage:
        more = f" (and {len(damage) - 1} more: see `linnet data check {folder}`)" if len(damage) > 1 else ""
        raise UserError(f"{damage[0]}{more}. Fix: restore the file, or prepare the data again.")


def sha256_file(path: Path) -> str:
    with reading(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file_problems(path: Path, size: int | None, sha256: str | None) -> list[str]:
    if not path.is_file():
        return [f"{path} is missing"]
    if size is not None and path.stat().st_size != size:
        return [f"{path} has {path.stat().st_size:,} bytes and should have {size:,}"]
    if sha256 is not None and sha256_file(path) != sha256:
        return [f"{path} was modified: its checksum differs from the index"]
    return []


def _map(folder: Path, index: Index, shard: int) -> Shaped[np.ndarray, " n"]:
    if not index.shards[shard].tokens:
        return np.zeros(0, index.dtype)
    with reading(folder / index.shards[shard].file):
        return np.memmap(folder / index.shards[shard].file, index.dtype, "r")


def _documents(folder: Path, split: SplitIndex) -> Int64[np.ndarray, "documents 2"]:
    return np.array(map_npy(folder / split.documents))
