"""Group the documents or images of a source into chunks, which worker processes turn into shards.

The assignment to chunks depends only on the source, never on the number of workers or on an earlier attempt.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

from linnet.data.sources.documents import Documents
from linnet.data.sources.images import ImageSource

CHUNK_BYTES = 16 << 20
UNSPLIT = "whole"
"""The single stream of a source that is split by its tail once its size is known."""
SPACE = b" \t\n\r\v\f"


class ChunkItem(NamedTuple):
    """Part of a document, or an image."""

    name: str
    data: bytes
    first: bool
    last: bool
    inside_word: bool
    """Whether the text before this part ends in the middle of a word."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    number: int
    """Index within its stream."""
    stream: str
    """train, validation, test, or `UNSPLIT`."""
    predefined: bool
    """Whether the source has predefined splits."""
    items: list[ChunkItem]

    @property
    def name(self) -> str:
        return f"{self.stream}-{self.number:05d}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitFractions:
    validation: float
    test: float

    def assign(self, name: str) -> str:
        """Return the split of a document by a hash of its name: the same on every machine, independent of the rest of the source."""
        draw = int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8], "big") / 2**64
        return "test" if draw < self.test else "validation" if draw < self.test + self.validation else "train"


class ChunkBuilder:
    """Collects items by stream until a chunk is full."""

    def __init__(self) -> None:
        self._items: dict[str, list[ChunkItem]] = {}
        self._sizes: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._predefined: dict[str, bool] = {}

    def add(self, split: str | None, default: str, item: ChunkItem) -> Iterator[Chunk]:
        stream = split or default
        self._predefined[stream] = split is not None
        self._items.setdefault(stream, []).append(item)
        self._sizes[stream] = self._sizes.get(stream, 0) + len(item.data)
        if self._sizes[stream] >= CHUNK_BYTES:
            yield self._close(stream)

    def flush(self) -> Iterator[Chunk]:
        for stream in [name for name, items in self._items.items() if items]:
            yield self._close(stream)

    def _close(self, stream: str) -> Chunk:
        number = self._numbers.get(stream, 0)
        chunk = Chunk(number=number, stream=stream, predefined=self._predefined[stream], items=self._items.pop(stream))
        self._sizes[stream], self._numbers[stream] = 0, number + 1
        return chunk


def text_chunks(source: Documents, fractions: SplitFractions) -> Iterator[tuple[Chunk, int]]:
    """Yield chunks, each with the number of input bytes read so far."""
    builder, position, inside_word = ChunkBuilder(), 0, False
    for part in source.parts():
        inside_word = inside_word and not part.first
        item = ChunkItem(part.name, part.data, part.first, part.last, inside_word)
        inside_word = part.data[-1:] not in (b"", *(SPACE[i : i + 1] for i in range(len(SPACE))))
        position = part.position
        for chunk in builder.add(part.split, UNSPLIT if source.is_single else fractions.assign(part.name), item):
            yield chunk, position
    for chunk in builder.flush():
        yield chunk, position


def image_chunks(source: ImageSource, fractions: SplitFractions) -> Iterator[tuple[Chunk, int]]:
    builder, position = ChunkBuilder(), 0
    for image in source.images():
        position = image.position
        item = ChunkItem(image.name, image.encoded, True, True, False)
        for chunk in builder.add(image.split, fractions.assign(image.name), item):
            yield chunk, position
    for chunk in builder.flush():
        yield chunk, position
