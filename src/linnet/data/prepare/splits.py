"""Build splits from streams of shards: document tables, and splitting by the tail where complete documents do not suffice."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int64

from linnet.data.index import SplitIndex, TokenShard, sha256_file
from linnet.data.npy_writer import write_array
from linnet.data.packed import ConcatArray
from linnet.data.prepare.chunks import UNSPLIT, SplitFractions
from linnet.data.prepare.shards import ShardManifest, read_part_table
from linnet.data.prepare.shards import count_words as words_in
from linnet.data.splits import SPLITS
from linnet.tokenizers.base import Tokenizer

READ_TOKENS = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardStream:
    """Documents in consecutive shards."""

    segments: list[list[int]]
    sizes: Int64[np.ndarray, " documents"]
    ends: Bool[np.ndarray, " documents"]
    bytes: int
    words: int

    @classmethod
    def read(
        cls, members: list[tuple[str, ShardManifest]], numbers: list[int], manifests: Path, ends: bool
    ) -> ShardStream:
        """Read the manifests of a stream and join the parts of split documents."""
        tables = [read_part_table(name, manifests) for name, _ in members]
        sizes, first, last = (np.concatenate(column) for column in zip(*tables, strict=True))
        if first.size:
            first[0] = True  # a split that begins in the middle of a text begins a new document
        document = np.cumsum(first) - 1
        document_sizes = np.zeros(int(first.sum()), np.int64)
        np.add.at(document_sizes, document, sizes)
        is_complete = np.zeros(document_sizes.size, bool)
        is_complete[document[last]] = True
        return cls(
            segments=[[number, 0, manifest.tokens] for number, (_, manifest) in zip(numbers, members, strict=True)],
            sizes=document_sizes,
            ends=is_complete & ends,
            bytes=sum(manifest.bytes for _, manifest in members),
            words=sum(manifest.words for _, manifest in members),
        )

    @property
    def n_documents(self) -> int:
        return self.sizes.size

    @property
    def tokens(self) -> int:
        return int(self.sizes.sum())

    def slice(self, start: int, stop: int) -> ShardStream:
        """Return tokens start to stop. The counts of bytes and words are not computed here."""
        last = np.cumsum(self.sizes)
        first = last - self.sizes
        inside = (np.minimum(last, stop) - np.maximum(first, start)) > 0
        segments, at = [], 0
        for shard, a, b in self.segments:
            low, high = max(start - at, 0), min(stop - at, b - a)
            if low < high:
                segments.append([shard, a + low, a + high])
            at += b - a
        return ShardStream(
            segments=segments,
            sizes=(np.minimum(last, stop) - np.maximum(first, start))[inside],
            ends=(self.ends & (last <= stop))[inside],
            bytes=0,
            words=0,
        )


def build_splits(
    streams: dict[str, ShardStream],
    fractions: SplitFractions,
    out: Path,
    shards: list[TokenShard],
    dtype: str,
    tokenizer: Tokenizer | None,
    *,
    count_words: bool,
    predefined: bool,
    unit: int,
) -> tuple[dict[str, SplitIndex], str]:
    """Return the three splits, and a description of how they were chosen.

    `tokenizer` is None if the content is bytes; `unit` is the number of tokens that must stay together (those of an image).
    """
    wanted = [name for name in ("validation", "test") if getattr(fractions, name) > 0]
    method = "the source's own splits" if predefined else "whole documents, by a hash of their names"
    streams = dict(streams)
    if not predefined and (UNSPLIT in streams or any(not _tokens(streams, name) for name in wanted)):
        # A single text, or too few documents for the hash to fill each split.
        method = "the tail of the stream"
        streams = _by_tail(_concatenate(streams), fractions, out, shards, dtype, tokenizer, unit)
    splits = {name: _write_split(name, streams.get(name), out, count_words) for name in SPLITS}
    return splits, method


def _tokens(streams: dict[str, ShardStream], name: str) -> int:
    return streams[name].tokens if name in streams else 0


def _concatenate(streams: dict[str, ShardStream]) -> ShardStream:
    """Concatenate all streams, in the order of the splits."""
    ordered = [streams[name] for name in (UNSPLIT, *SPLITS) if name in streams]
    return ShardStream(
        segments=[segment for stream in ordered for segment in stream.segments],
        sizes=np.concatenate([stream.sizes for stream in ordered]) if ordered else np.zeros(0, np.int64),
        ends=np.concatenate([stream.ends for stream in ordered]) if ordered else np.zeros(0, bool),
        bytes=sum(stream.bytes for stream in ordered),
        words=sum(stream.words for stream in ordered),
    )


def _by_tail(
    stream: ShardStream,
    fractions: SplitFractions,
    out: Path,
    shards: list[TokenShard],
    dtype: str,
    tokenizer: Tokenizer | None,
    unit: int,
) -> dict[str, ShardStream]:
    """Split into train, validation and test, in order. Only the held-out parts are read again, to count their bytes and words."""
    total = stream.tokens
    sizes = {name: int(getattr(fractions, name) * total / unit + 1e-6) * unit for name in ("validation", "test")}
    offsets = (0, total - sum(sizes.values()), total - sizes["test"], total)
    ranges = dict(zip(SPLITS, itertools.pairwise(offsets), strict=True))
    parts = {name: stream.slice(*span) for name, span in ranges.items()}
    held_out = {name: _count_content(parts[name], out, shards, dtype, tokenizer) for name in ("validation", "test")}
    rest = dataclasses.replace(
        parts["train"],
        bytes=stream.bytes - sum(part.bytes for part in held_out.values()),
        words=max(0, stream.words - sum(part.words for part in held_out.values())),
    )
    return {"train": rest, **held_out}


def _count_content(
    stream: ShardStream, out: Path, shards: list[TokenShard], dtype: str, tokenizer: Tokenizer | None
) -> ShardStream:
    content = ConcatArray([np.memmap(out / shards[shard].file, dtype, "r")[a:b] for shard, a, b in stream.segments])
    n_bytes, n_words, inside_word = 0, 0, False
    for at in range(0, content.size, READ_TOKENS):
        part = content[at : at + READ_TOKENS]
        text = part.tobytes() if tokenizer is None else tokenizer.decode(part.tolist())
        n_bytes += len(text)
        n_words += words_in(text, inside_word)
        inside_word = bool(text) and not text[-1:].isspace()
    return dataclasses.replace(stream, bytes=n_bytes, words=n_words)


def _write_split(name: str, stream: ShardStream | None, out: Path, count_words: bool) -> SplitIndex:
    stream = stream or ShardStream(segments=[], sizes=np.zeros(0, np.int64), ends=np.zeros(0, bool), bytes=0, words=0)
    file = f"{name}.documents.npy"
    write_array(out / file, np.stack([stream.sizes, stream.ends.astype(np.int64)], axis=1))
    return SplitIndex(
        segments=[segment for segment in stream.segments if segment[1] < segment[2]],
        documents=file,
        documents_sha256=sha256_file(out / file),
        n_documents=stream.n_documents,
        tokens=stream.tokens,
        bytes=stream.bytes,
        words=stream.words if count_words else None,
    )
