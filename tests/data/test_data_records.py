"""Rows of JSON lines, Parquet files and data sets of the Hub are documents; columns and lines that are not are said."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pyarrow as pa
import pytest
from document_files import NOT_UTF8, PACKERS, jsonl, parquet, read_all, rejection, write, zipped

from linnet.core.errors import UserError
from linnet.data.sources import documents as documents_module
from linnet.data.sources import records
from linnet.data.sources.documents import open_documents


@pytest.mark.parametrize("codec", ["", *PACKERS])
def test_json_lines(tmp_path: Path, codec: str) -> None:
    rows = [{"text": "one", "n": 1}, {"text": None}, {"text": ""}, {"text": 5}, {"n": 2}, {"text": "zwölf\n\ud800"}]
    content = b"\xef\xbb\xbf" + jsonl(rows) + b'\n{"text": "' + NOT_UTF8.strip() + b'"}'
    name = f"a.jsonl{codec}"
    documents = open_documents(write(tmp_path / name, PACKERS.get(codec, bytes)(content)))
    assert (documents.is_single, documents.ends_with_eos) == (False, True)
    assert read_all(documents) == [
        (f"{name}:1", b"one"),
        (f"{name}:6", "zwölf\n".encode() + b"\xed\xa0\x80"),
        (f"{name}:8", NOT_UTF8.strip()),
    ]
    assert documents.left_out == {"null_rows": 1, "empty": 1, "not_text": 1, "no_column": 1, "blank_lines": 1}


def test_row_longer_than_a_part_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "PART_BYTES", 100)
    for name, content in {"a.jsonl": jsonl([{"text": "x" * 250}]), "a.parquet": parquet({"text": ["x" * 250]})}.items():
        parts = list(open_documents(write(tmp_path / name, content)).parts())
        assert [len(part.data) for part in parts] == [100, 100, 50]
        assert {part.name for part in parts} == {f"{name}:1"}


def test_few_bad_lines_are_counted_and_many_rejected(tmp_path: Path) -> None:
    good = jsonl([{"text": "x"}]) * 150
    documents = open_documents(write(tmp_path / "few.jsonl", good + b"{broken\n" + good))
    assert len(read_all(documents)) == 300
    assert documents.left_out == {"bad_json": 1}
    many = write(tmp_path / "many.jsonl", good + b'{broken\n[1]\n"text"\n}\n' + good)
    open_documents(many)
    assert f"{many}: 4 of 304 lines are not JSON objects (the first is line 151)" in rejection(many)
    assert "the first is line 1)" in rejection(write(tmp_path / "text.jsonl", b"plain text\n" * 500))
    deep = good + b'{"text":' + b"[" * 100_000 + b"\n" + b'{"text": 1' + b"0" * 5000 + b"}\n" + good
    documents = open_documents(write(tmp_path / "deep.jsonl", deep))
    assert len(read_all(documents)) == 300
    assert documents.left_out == {"bad_json": 2}


def test_endless_line_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_LINE", 50)
    message = rejection(write(tmp_path / "a.jsonl", jsonl([{"text": "x"}]) + b"y" * 60))
    assert "a.jsonl: line 2 is longer than 50 bytes" in message


def test_columns_that_are_not_there_are_rejected_with_those_that_are(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", jsonl([{"body": "x", "id": 1}] * 500))
    table = write(tmp_path / "a.parquet", parquet({"body": ["x"], "id": [1]}))
    for source in (lines, table, str(tmp_path)):
        with pytest.raises(UserError, match="--column is 'text', .*it has: body, id"):
            open_documents(source)
    assert read_all(open_documents(table, column="body")) == [("a.parquet:1", b"x")]
    assert f"in {table} it is int64" in rejection(table, "id")
    assert "since the source is plain text" in rejection(write(tmp_path / "a.txt", b"x"), "body")
    late = jsonl([{"body": "x"}] * records.MIN_ROWS_TRIED + [{"text": "x"}])
    assert "it has: body" in rejection(write(tmp_path / "late.jsonl", late))
    assert "--column is 'text'" in rejection(write(tmp_path / "a.zip", zipped({"a.jsonl": jsonl([{"body": "x"}])})))


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.string())]
)
def test_parquet(tmp_path: Path, kind: pa.DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "BATCH_BYTES", 64)
    texts = [f"row {i} é" for i in range(40)]
    array = pa.array([*texts, None, ""], pa.string()).cast(kind)
    content = parquet({"id": list(range(42)), "text": array}, row_group_size=17)
    documents = open_documents(write(tmp_path / "a.parquet", content))
    assert (documents.is_single, documents.ends_with_eos) == (False, True)
    assert read_all(documents) == [(f"a.parquet:{i + 1}", text.encode()) for i, text in enumerate(texts)]
    assert documents.left_out == {"null_rows": 1, "empty": 1}


def test_parquet_keeps_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    array = pa.array([NOT_UTF8]).view(pa.string())
    assert read_all(open_documents(write(tmp_path / "a.parquet", parquet({"text": array})))) == [
        ("a.parquet:1", NOT_UTF8)
    ]


# Hugging Face


def fake_hub(monkeypatch: pytest.MonkeyPatch, splits: dict[str, list[dict[str, object]]]) -> list[tuple[object, ...]]:
    calls: list[tuple[object, ...]] = []

    def load_dataset(name: str, config: str | None, *, streaming: bool) -> dict[str, list[dict[str, object]]]:
        calls.append((name, config, streaming))
        return splits

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_data_set_of_the_hub_keeps_its_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    splits: dict[str, list[dict[str, object]]] = {
        "train": [{"text": "a"}, {"text": None}, {"text": "b"}],
        "valid": [{"text": "c"}],
        "test": [{"text": "d"}],
        "unsupervised": [{"text": "e"}],
        "dev": [{"text": "f"}],
    }
    calls = fake_hub(monkeypatch, splits)
    documents = open_documents("hf:owner/name:config-1")
    assert calls == [("owner/name", "config-1", True)]
    assert [(p.name, p.data, p.split) for p in documents.parts()] == [
        ("owner/name/train:1", b"a", "train"),
        ("owner/name/train:3", b"b", "train"),
        ("owner/name/validation:1", b"c", "validation"),
        ("owner/name/test:1", b"d", "test"),
    ]
    assert documents.left_out == {"null_rows": 1, "split_unsupervised": 1, "split_dev": 1}
    assert (documents.is_single, documents.ends_with_eos, documents.n_bytes) == (False, True, None)
    json.dumps(documents.identity())


def test_one_split_of_the_hub_is_divided_as_any_source(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, {"train": [{"body": "a"}]})
    assert [p.split for p in open_documents("hf:owner/name", column="body").parts()] == [None]
    assert "it has: body" in rejection("hf:owner/name")
    fake_hub(monkeypatch, {"de": [], "en": []})
    assert "(it has: de, en)" in rejection("hf:owner/name")
    fake_hub(monkeypatch, {"train": []})
    assert "a source with text" in rejection("hf:owner/name")


def test_hub_errors_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'linnet-lm[datasets]'" in rejection("hf:owner/name")
    assert "hf:OWNER/NAME" in rejection("hf:owner/name/more")

    def no_network(*_: object, **__: object) -> None:
        raise RuntimeError("Couldn't reach the Hub.\nmore")

    fake_hub(monkeypatch, {})
    sys.modules["datasets"].load_dataset = no_network  # pyright: ignore[reportAttributeAccessIssue]
    assert "the dataset 'owner/name' cannot be read (Couldn't reach the Hub)" in rejection("hf:owner/name")
