"""Rows of text: one column of JSON lines, parquet or a Hugging Face dataset, with every skipped row counted."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from os import PathLike
from typing import TYPE_CHECKING, Any, BinaryIO

from linnet.core.errors import UserError, invalid
from linnet.data.sources.archives import open_parquet

if TYPE_CHECKING:
    import pyarrow.parquet as pq

MAX_LINE = 256 << 20
"""A longer line is not a JSON line, and reading it could exhaust memory."""
MAX_BAD_FRACTION = 0.01
MIN_ROWS_TRIED = 100
"""Rows to read before a column that none of them has counts as missing."""
BATCH_BYTES = 4 << 20
HUB = "hf:"
SPLIT_NAMES = {"train": "train", "test": "test"} | dict.fromkeys(("validation", "valid", "val", "dev"), "validation")


def missing_column(where: str, column: str, existing: Iterable[str]) -> UserError:
    names = ", ".join(sorted(existing)) or "none"
    return invalid("--column", column, f"a column of {where} (it has: {names})", "name one of those with --column")


def json_rows(lines: BinaryIO, where: str, column: str, left_out: Counter[str]) -> Iterator[tuple[int, bytes]]:
    """Yield the line number and text of each JSON line."""
    n_rows = n_bad = first_bad = 0
    columns: set[str] | None = set()
    for number, line in _lines(lines, where):
        if not line.strip():
            left_out["blank_lines"] += 1
            continue
        row = _json_object(line)
        n_rows += 1
        if row is None:
            left_out["bad_json"] += 1
            n_bad, first_bad = n_bad + 1, first_bad or number
        elif column in row:
            columns = None
            if (text := _text(row[column], left_out)) is not None:
                yield number, text
        else:
            left_out["no_column"] += 1
            if columns is not None:
                columns.update(row)
        if columns is not None and n_rows == MIN_ROWS_TRIED:
            _check_bad_lines(where, n_rows, n_bad, first_bad)
            raise missing_column(where, column, columns)
    _check_bad_lines(where, n_rows, n_bad, first_bad)
    if n_rows and columns is not None:
        raise missing_column(where, column, columns)


def _lines(stream: BinaryIO, where: str) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := stream.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise UserError(
                f"{where}: line {number} is longer than {MAX_LINE:,} bytes. Fix: write one JSON object per line, or give it a "
                "name that does not end in .jsonl to read it as plain text."
            )
        yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


def _json_object(line: bytes) -> dict[str, Any] | None:
    try:
        # Bytes that are not UTF-8 are restored when the text is encoded again.
        row = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _check_bad_lines(where: str, n_rows: int, n_bad: int, first_bad: int) -> None:
    if n_bad > MAX_BAD_FRACTION * n_rows:
        raise UserError(
            f"{where}: {n_bad:,} of {n_rows:,} lines are not JSON objects (the first is line {first_bad}), more than "
            f"{MAX_BAD_FRACTION:.0%}. Fix: write one JSON object per line, or give it a name that does not end in .jsonl to read it "
            "as plain text."
        )


def _text(value: object, left_out: Counter[str]) -> bytes | None:
    """Return the bytes of one cell; None, and counted, if there is no text in it."""
    if isinstance(value, str):
        value = _encoded(value)
    if isinstance(value, bytes) and value:
        return value
    left_out["null_rows" if value is None else "empty" if value == b"" else "not_text"] += 1
    return None


def _encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate, which JSON can express and UTF-8 cannot
        return text.encode("utf-8", "surrogatepass")


@contextlib.contextmanager
def open_text_column(path: str | PathLike[str], column: str) -> Iterator[pq.ParquetFile]:
    """Open a parquet file and check that it has the column, as text, and consistent row counts."""
    with open_parquet(path, memory_map=True) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise missing_column(str(path), column, names)
        kind = str(file.schema_arrow.field(column).type)
        if not re.search("string|binary|null", kind) or re.search("list|struct|map", kind):
            raise invalid("--column", column, f"text, but in {path} it is {kind}", "name a column of text")
        groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        if sum(groups) != file.metadata.num_rows or min(groups, default=0) < 0:
            raise OSError("the row counts of its row groups do not add up")
        yield file


def parquet_rows(file: pq.ParquetFile, column: str, left_out: Counter[str]) -> Iterator[tuple[int, bytes]]:
    """Yield the row number (from 1) and text of each row, a few megabytes at a time."""
    import pyarrow as pa

    number = 0
    # One group at a time, because large groups are only freed with their reader.
    for group in range(file.num_row_groups):
        rows = _rows_per_batch(file, group)
        for batch in file.iter_batches(batch_size=rows, row_groups=[group], columns=[column], use_threads=False):
            cells = batch.column(0)
            if isinstance(cells, pa.DictionaryArray):
                cells = cells.dictionary_decode()
            # As binary, because a text column may contain bytes that are not UTF-8.
            for cell in cells.cast(pa.large_binary()):
                number += 1
                if (text := _text(cell.as_py(), left_out)) is not None:
                    yield number, text
    if number != file.metadata.num_rows:
        raise OSError(f"it has {number:,} rows and should have {file.metadata.num_rows:,}")


def _rows_per_batch(file: pq.ParquetFile, group: int) -> int:
    # By the size of complete rows: querying the size of one column in a broken footer can crash the process.
    metadata = file.metadata.row_group(group)
    return max(1, min(4096, BATCH_BYTES * metadata.num_rows // max(metadata.total_byte_size, 1)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HubDataset:
    """A Hugging Face dataset, read as a stream, with its splits under our names."""

    name: str
    config: str | None
    column: str
    splits: dict[str | None, Iterable[dict[str, Any]]]
    """Splits by our name; the name is None if the dataset has only one split, which is then split like any other source."""
    left_out: Counter[str]

    def rows(self, split: str | None, left_out: Counter[str]) -> Iterator[tuple[int, bytes]]:
        rows = iter(self.splits[split])
        number = 0
        while True:
            with _hub_errors(self.name):
                row = next(rows, None)
            if row is None:
                return
            number += 1
            if self.column not in row:
                raise missing_column(self.name, self.column, row)
            if (text := _text(row[self.column], left_out)) is not None:
                yield number, text


def open_hub(source: str, column: str) -> HubDataset:
    """Open `hf:OWNER/NAME[:CONFIG]` with the package `datasets`."""
    match = re.fullmatch(HUB + r"((?:[\w.-]+/)?[\w.-]+)(?::([\w.+-]+))?", source)
    if not match:
        raise invalid(
            "SOURCE", source, "hf:OWNER/NAME or hf:OWNER/NAME:CONFIG", "for example hf:roneneldan/TinyStories"
        )
    name, config = match.groups()
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise invalid(
            "SOURCE",
            source,
            "readable by the package 'datasets', which is missing",
            "pip install 'linnet-lm[datasets]'",
        ) from None
    with _hub_errors(name):
        dataset: dict[str, Any] = dict(datasets.load_dataset(name, config, streaming=True))
    splits, left_out = _map_splits(dataset)
    if not splits:
        raise invalid(
            "SOURCE",
            source,
            f"a dataset with the splits train, validation or test (it has: {', '.join(dataset)})",
            "name another configuration with hf:OWNER/NAME:CONFIG, or download its files and name them",
        )
    return HubDataset(name=name, config=config, column=column, splits=splits, left_out=left_out)


def _map_splits(dataset: dict[str, Any]) -> tuple[dict[str | None, Iterable[dict[str, Any]]], Counter[str]]:
    """Return the splits under our names, and counts of those that have no such name or are duplicates."""
    splits: dict[str | None, Iterable[dict[str, Any]]] = {}
    if len(dataset) == 1:
        splits[None] = next(iter(dataset.values()))
        return splits, Counter()
    left_out: Counter[str] = Counter()
    for theirs, rows in dataset.items():
        ours = SPLIT_NAMES.get(theirs)
        if ours is None or ours in splits:
            left_out[f"split_{theirs}"] += 1
        else:
            splits[ours] = rows
    return splits, left_out


@contextlib.contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the package and its dependencies raise arbitrary exceptions
        reason = (str(error).splitlines() or [""])[0].rstrip(". ") or type(error).__name__
        raise UserError(
            f"the dataset {name!r} cannot be read ({reason}). Fix: check its name, its configuration "
            "(hf:OWNER/NAME:CONFIG) and the network, or download its files and name them as SOURCE."
        ) from error
