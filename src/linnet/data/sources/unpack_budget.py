"""Limit on the unpacked size of a source, against decompression bombs."""

from __future__ import annotations

import io
from os import PathLike
from typing import Any, BinaryIO, cast

from linnet.core.errors import UserError, invalid

RATIO = 100
"""Text compresses to a tenth, logs to a fiftieth; weights and embeddings hardly at all. Bombs reach 1,000 and more."""
FLOOR_BYTES = 256 << 20
"""Unpacked size that is always allowed, at any ratio."""
FLAG = "--max-unpacked-gb"


class UnpackBudget:
    """Counts unpacked bytes and raises when they exceed the limit."""

    def __init__(
        self,
        where: str | PathLike[str],
        packed_bytes: int,
        limit_gb: float | None = None,
        flag: str | None = FLAG,
    ) -> None:
        """Set the limit to `limit_gb`, or by default to a multiple of the packed size.

        `flag` is the command-line flag that raises the limit; None if the command has none.
        """
        if limit_gb is not None and not 0 < limit_gb < 1e9:
            raise invalid(flag or FLAG, limit_gb, "a positive number of gigabytes", "use 10")
        self._where, self._packed, self._flag, self._is_explicit = where, packed_bytes, flag, limit_gb is not None
        self.limit = max(FLOOR_BYTES, RATIO * packed_bytes) if limit_gb is None else int(limit_gb * 1e9)
        self.n_bytes = 0

    def spend(self, n: int) -> None:
        self.n_bytes += n
        if self.n_bytes > self.limit:
            raise self._exceeded()

    def claim(self, n: int) -> None:
        """Check a declared size before anything is unpacked, without counting it."""
        if n > self.limit:
            raise self._exceeded()

    def _exceeded(self) -> UserError:
        rule = (
            f"what {self._flag} allows"
            if self._is_explicit
            else f"{RATIO} times its packed size ({self._packed:,} bytes)"
        )
        allow = f", or, if you trust it, allow more with {self._flag} GIGABYTES" if self._flag else ""
        return UserError(
            f"{self._where} unpacks to more than {self.limit:,} bytes, which is more than {rule}; it may be a decompression bomb. "
            f"Fix: leave it out{allow}."
        )


class CountedStream(io.RawIOBase):
    """A stream whose bytes are counted against a budget while they are read."""

    def __init__(self, stream: BinaryIO, budget: UnpackBudget) -> None:
        self._stream, self._budget = stream, budget

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._budget.spend(len(data))
        buffer[: len(data)] = data
        return len(data)


def count_bytes(stream: BinaryIO, budget: UnpackBudget) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(CountedStream(stream, budget), 1 << 16))
