"""Every source of text gives its documents byte for byte; what is broken is said with the file's name."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import sys
import tarfile
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from linnet.data import documents as documents_module
from linnet.data import records
from linnet.data.archives import kind_of
from linnet.data.documents import Documents, Part, cut, open_documents
from linnet.errors import UserError

NOT_UTF8 = b"caf\xe9 \xff\xfe\xc3(\n"


def zst(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tarred(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def jsonl(rows: list[object]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def parquet(columns: dict[str, object], **options: object) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, **options)  # pyright: ignore[reportArgumentType]
    return buffer.getvalue()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zst,
}


def write(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def whole(documents: Documents) -> list[tuple[str, bytes]]:
    """Name and content of each document, after checking that its parts are in order."""
    found: list[tuple[str, bytes]] = []
    position, open_name = 0, None
    for part in documents.parts():
        assert 0 < len(part.data) <= documents_module.PART_BYTES
        assert position <= part.position
        assert documents.n_bytes is None or part.position <= documents.n_bytes
        position = part.position
        assert part.first == (open_name is None)
        assert part.first or part.name == open_name
        if part.first:
            found.append((part.name, b""))
        found[-1] = (part.name, found[-1][1] + part.data)
        open_name = None if part.last else part.name
    assert open_name is None
    return found


def refused(source: str, column: str | None = None) -> str:
    with pytest.raises(UserError) as caught:
        list(open_documents(source, column=column).parts())
    assert "Fix: " in str(caught.value)
    return str(caught.value)


# Cutting


@hypothesis.given(st.binary(max_size=300), st.integers(4, 40), st.integers(1, 50))
def test_cut_keeps_every_byte(data: bytes, limit: int, at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "PART_BYTES", limit)
        stream = io.BytesIO(data)
        parts = list(cut(lambda n: stream.read(min(n, at_once))))
    assert b"".join(part for part, _, _ in parts) == data
    assert all(0 < len(part) <= limit for part, _, _ in parts)
    assert [first for _, first, _ in parts] == [i == 0 for i in range(len(parts))]
    assert [last for _, _, last in parts] == [i == len(parts) - 1 for i in range(len(parts))]


@hypothesis.given(st.text(max_size=100), st.integers(4, 20))
def test_cut_never_divides_a_character(text: str, limit: int) -> None:
    text = text.encode("utf-8", "ignore").decode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "PART_BYTES", limit)
        parts = [part for part, _, _ in cut(io.BytesIO(text.encode()).read)]
    assert "".join(part.decode() for part in parts) == text


def test_cut_prefers_the_end_of_a_line_nearby(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "PART_BYTES", 10)
    assert [part for part, _, _ in cut(io.BytesIO(b"ab\ncd\nefghijk").read)] == [b"ab\ncd\n", b"efghijk"]
    monkeypatch.setattr(documents_module, "NEWLINE_WITHIN", 3)
    assert [part for part, _, _ in cut(io.BytesIO(b"ab\ncd\nefghijk").read)] == [b"ab\ncd\nefgh", b"ijk"]


def test_a_long_file_comes_in_parts_of_bounded_size(tmp_path: Path) -> None:
    content = b"a line of text\n" * 600_000
    documents = open_documents(write(tmp_path / "long.txt", content))
    parts = list(documents.parts())
    assert len(parts) == 3
    assert all(part.data.endswith(b"\n") for part in parts)
    assert b"".join(part.data for part in parts) == content
    assert parts[-1].position == documents.n_bytes == len(content)


# Plain and packed text


def test_one_text_file_is_one_stream(tmp_path: Path) -> None:
    documents = open_documents(write(tmp_path / "a.txt", NOT_UTF8))
    assert (documents.single, documents.ends) == (True, False)
    assert list(documents.parts()) == [Part("a.txt", NOT_UTF8, True, True, None, len(NOT_UTF8))]


@pytest.mark.parametrize("codec", PACKERS)
def test_a_packed_text_is_one_stream(tmp_path: Path, codec: str) -> None:
    content = NOT_UTF8 * 50_000
    documents = open_documents(write(tmp_path / f"a.txt{codec}", PACKERS[codec](content)))
    assert (documents.single, documents.ends) == (True, False)
    assert whole(documents) == [(f"a.txt{codec}", content)]
    twice = open_documents(write(tmp_path / f"twice{codec}", PACKERS[codec](b"one") + PACKERS[codec](b"two")))
    assert whole(twice) == [(f"twice{codec}", b"onetwo")]


def test_a_folder_of_all_kinds(tmp_path: Path) -> None:
    for name, content in {
        "a.txt": b"a",
        "b.txt.gz": gzip.compress(b"b"),
        "c.ZIP": zipped({"x/1.txt": b"c1", "2.txt.zst": zst(b"c2")}),
        "d.jsonl": jsonl([{"text": "d1"}, {"text": "d2"}]),
        "e.parquet": parquet({"text": ["e1"]}),
        "f.tgz": gzip.compress(tarred({"./1": b"f1"})),
        "g.png": b"\x89PNG\0",
        "h.txt": b"",
        "i.gz": gzip.compress(b"PNG\0"),
        "j.xz": lzma.compress(b""),
    }.items():
        write(tmp_path / name, content)
    documents = open_documents(str(tmp_path))
    assert (documents.single, documents.ends) == (False, True)
    for _ in range(2):  # each reading counts anew
        assert whole(documents) == [
            ("a.txt", b"a"),
            ("b.txt.gz", b"b"),
            ("c.ZIP/x/1.txt", b"c1"),
            ("c.ZIP/2.txt.zst", b"c2"),
            ("d.jsonl:1", b"d1"),
            ("d.jsonl:2", b"d2"),
            ("e.parquet:1", b"e1"),
            ("f.tgz/./1", b"f1"),
        ]
        assert documents.left_out == {"binary": 2, "empty": 2}
    assert [name for name, _ in whole(open_documents(f"{tmp_path}/[ab]*"))] == ["a.txt", "b.txt.gz"]


@pytest.mark.parametrize(("name", "pack"), [("a.zip", zipped), ("a.tar", tarred)])
def test_members_are_documents(tmp_path: Path, name: str, pack: Callable[[dict[str, bytes]], bytes]) -> None:
    members = {"b/2.txt": NOT_UTF8, "a.txt": b"first", ".hidden": b"h", "__MACOSX/a.txt": b"m", "none": b""}
    documents = open_documents(write(tmp_path / name, pack(members | {"x.png": b"\0", "in.zip": zipped({"y": b"y"})})))
    assert (documents.single, documents.ends) == (False, True)
    assert whole(documents) == [(f"{name}/b/2.txt", NOT_UTF8), (f"{name}/a.txt", b"first")]
    assert documents.left_out == {"hidden": 2, "empty": 1, "binary": 1, "packed_twice": 1}


def test_a_zip_of_one_text_is_one_stream(tmp_path: Path) -> None:
    assert open_documents(write(tmp_path / "a.zip", zipped({"enwik": b"text"}))).single
    assert not open_documents(write(tmp_path / "b.zip", zipped({"a.jsonl": jsonl([{"text": "x"}])}))).single


def test_progress_never_turns_back(tmp_path: Path) -> None:
    members = {f"{i}.txt": os.urandom(500).hex().encode() for i in range(20)}
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.filelist.reverse()  # the table of contents in another order than the content
    write(tmp_path / "b.txt", b"b")
    documents = open_documents(str(tmp_path))
    write(tmp_path / "b.txt", b"b" * 500)  # grows after the look at it
    assert [name for name, _ in whole(documents)] == [*(f"a.zip/{i}.txt" for i in reversed(range(20))), "b.txt"]


def test_links_in_a_tar_are_counted(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "a"
        archive.addfile(link)
        member = tarfile.TarInfo("a")
        member.size = 1
        archive.addfile(member, io.BytesIO(b"a"))
    documents = open_documents(str(tmp_path / "a.tar"))
    assert whole(documents) == [("a.tar/a", b"a")]
    assert documents.left_out == {"not_regular": 1}


def test_the_standard_library_is_documents() -> None:
    documents = open_documents("python-stdlib")
    part = next(documents.parts())
    assert part.name.endswith(".py")
    assert documents.ends


def test_names_that_are_no_utf8_can_be_stored(tmp_path: Path) -> None:
    os.makedirs(tmp_path / "d")
    for name in (b"caf\xe9.txt", b"b.txt"):
        Path(os.fsdecode(os.fsencode(tmp_path / "d") + b"/" + name)).write_bytes(b"x")
    documents = open_documents(str(tmp_path / "d"))
    assert [name for name, _ in whole(documents)] == ["b.txt", "caf\\xe9.txt"]
    json.dumps(documents.identity()).encode("ascii")


def test_identity_follows_the_input_and_the_options(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", jsonl([{"text": "a", "other": "b"}]))
    before = open_documents(path).identity()
    assert open_documents(path).identity() == before
    assert json.loads(json.dumps(before)) == before
    assert open_documents(path, column="other").identity() != before
    os.utime(path, ns=(1, 1))
    assert open_documents(path).identity() != before


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.JSONL.GZ", ("jsonl", ".gz")),
        ("a.ndjson", ("jsonl", "")),
        ("a.tar.zst", ("tar", ".zst")),
        ("a.tgz", ("tar", ".gz")),
        ("a.zip", ("zip", "")),
        ("a.parquet", ("parquet", "")),
        ("a.json", ("text", "")),
        ("gz", ("text", "")),
    ],
)
def test_what_a_name_says(name: str, expected: tuple[str, str]) -> None:
    assert kind_of(name) == expected


# Rows


@pytest.mark.parametrize("codec", ["", *PACKERS])
def test_json_lines(tmp_path: Path, codec: str) -> None:
    rows = [{"text": "one", "n": 1}, {"text": None}, {"text": ""}, {"text": 5}, {"n": 2}, {"text": "zwölf\n\ud800"}]
    content = b"\xef\xbb\xbf" + jsonl(rows) + b'\n{"text": "' + NOT_UTF8.strip() + b'"}'
    name = f"a.jsonl{codec}"
    documents = open_documents(write(tmp_path / name, PACKERS.get(codec, bytes)(content)))
    assert (documents.single, documents.ends) == (False, True)
    assert whole(documents) == [
        (f"{name}:1", b"one"),
        (f"{name}:6", "zwölf\n".encode() + b"\xed\xa0\x80"),
        (f"{name}:8", NOT_UTF8.strip()),
    ]
    assert documents.left_out == {"null_rows": 1, "empty": 1, "not_text": 1, "no_column": 1, "blank_lines": 1}


def test_a_row_longer_than_a_part_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "PART_BYTES", 100)
    for name, content in {"a.jsonl": jsonl([{"text": "x" * 250}]), "a.parquet": parquet({"text": ["x" * 250]})}.items():
        parts = list(open_documents(write(tmp_path / name, content)).parts())
        assert [len(part.data) for part in parts] == [100, 100, 50]
        assert {part.name for part in parts} == {f"{name}:1"}


def test_few_bad_lines_are_counted_and_many_refused(tmp_path: Path) -> None:
    good = jsonl([{"text": "x"}]) * 150
    documents = open_documents(write(tmp_path / "few.jsonl", good + b"{broken\n" + good))
    assert len(whole(documents)) == 300
    assert documents.left_out == {"bad_json": 1}
    many = write(tmp_path / "many.jsonl", good + b'{broken\n[1]\n"text"\n}\n' + good)
    open_documents(many)
    assert f"{many}: 4 of 304 lines are not JSON objects (the first is line 151)" in refused(many)
    assert "the first is line 1)" in refused(write(tmp_path / "text.jsonl", b"plain text\n" * 500))
    deep = good + b'{"text":' + b"[" * 100_000 + b"\n" + b'{"text": 1' + b"0" * 5000 + b"}\n" + good
    documents = open_documents(write(tmp_path / "deep.jsonl", deep))
    assert len(whole(documents)) == 300
    assert documents.left_out == {"bad_json": 2}


def test_an_endless_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_LINE", 50)
    message = refused(write(tmp_path / "a.jsonl", jsonl([{"text": "x"}]) + b"y" * 60))
    assert "a.jsonl: line 2 is longer than 50 bytes" in message


def test_columns_that_are_not_there_are_refused_with_those_that_are(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", jsonl([{"body": "x", "id": 1}] * 500))
    table = write(tmp_path / "a.parquet", parquet({"body": ["x"], "id": [1]}))
    for source in (lines, table, str(tmp_path)):
        with pytest.raises(UserError, match="--column is 'text', .*it has: body, id"):
            open_documents(source)
    assert whole(open_documents(table, column="body")) == [("a.parquet:1", b"x")]
    assert f"in {table} it is int64" in refused(table, "id")
    assert "since the source is plain text" in refused(write(tmp_path / "a.txt", b"x"), "body")
    late = jsonl([{"body": "x"}] * records.TRIED_ROWS + [{"text": "x"}])
    assert "it has: body" in refused(write(tmp_path / "late.jsonl", late))
    assert "--column is 'text'" in refused(write(tmp_path / "a.zip", zipped({"a.jsonl": jsonl([{"body": "x"}])})))


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.string())]
)
def test_parquet(tmp_path: Path, kind: pa.DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "BATCH_BYTES", 64)
    texts = [f"row {i} é" for i in range(40)]
    array = pa.array([*texts, None, ""], pa.string()).cast(kind)
    content = parquet({"id": list(range(42)), "text": array}, row_group_size=17)
    documents = open_documents(write(tmp_path / "a.parquet", content))
    assert (documents.single, documents.ends) == (False, True)
    assert whole(documents) == [(f"a.parquet:{i + 1}", text.encode()) for i, text in enumerate(texts)]
    assert documents.left_out == {"null_rows": 1, "empty": 1}


def test_parquet_keeps_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    array = pa.array([NOT_UTF8]).view(pa.string())
    assert whole(open_documents(write(tmp_path / "a.parquet", parquet({"text": array})))) == [("a.parquet:1", NOT_UTF8)]


# What is broken


def broken_files() -> dict[str, bytes]:
    text = os.urandom(100_000).hex().encode()
    members = {"a.txt": text[:70_000], "b.txt": text[70_000:]}
    packed = {f"a.txt{codec}": pack(text) for codec, pack in PACKERS.items()}
    rows = [text[i : i + 1000].decode() for i in range(0, 200_000, 1000)]
    lines = gzip.compress(jsonl([{"text": row} for row in rows]))
    return packed | {
        "a.zip": zipped(members),
        "a.tar": tarred(members),
        "a.tar.zst": zst(tarred(members)),
        "a.parquet": parquet({"text": rows}),
        "a.jsonl.gz": lines,
    }


@pytest.mark.parametrize("name", broken_files())
def test_a_truncated_file_is_named(tmp_path: Path, name: str) -> None:
    content = broken_files()[name]
    assert whole(open_documents(write(tmp_path / name, content)))
    for keep in (5, len(content) // 3, len(content) - 600 if name == "a.tar" else len(content) - 3):
        if name == "a.tar":
            keep = min(keep, content.rindex(b"ustar") + 100)  # what comes after the last member may be missing
        message = refused(write(tmp_path / name, content[:keep]))
        assert str(tmp_path / name) in message
    assert str(tmp_path / name) in refused(write(tmp_path / name, b"this is no archive at all, but plain text" * 100))


@pytest.mark.parametrize("name", broken_files())
def test_a_flipped_byte_never_gives_a_traceback(tmp_path: Path, name: str) -> None:
    content = bytearray(broken_files()[name])
    for at in (0, 3, 8, 20, len(content) // 2, len(content) - 30, len(content) - 8):
        flipped = content.copy()
        flipped[at] ^= 0x55
        path = write(tmp_path / name, bytes(flipped))
        with contextlib.suppress(UserError):
            whole(open_documents(path))


def test_a_footer_with_wrong_numbers_of_rows_is_refused(tmp_path: Path) -> None:
    content = parquet({"text": [f"row {i}" for i in range(50)]})
    says: list[str] = []
    for at in [i for i, byte in enumerate(content) if byte == 100]:  # how a footer spells 50
        path = write(tmp_path / "a.parquet", content[:at] + bytes([90]) + content[at + 1 :])
        try:
            whole(open_documents(path))
        except UserError as error:
            says.append(str(error))
    assert any("another number of rows than the whole" in message for message in says)


def test_an_encrypted_zip_is_refused(tmp_path: Path) -> None:
    content = bytearray(zipped({"a.txt": b"secret"}))
    content[6] |= 1
    content[content.index(b"PK\x01\x02") + 8] |= 1
    assert "a.txt is encrypted" in refused(write(tmp_path / "a.zip", bytes(content)))


def test_a_source_without_text_is_refused(tmp_path: Path) -> None:
    assert "left out: 1 binary" in refused(write(tmp_path / "a.gz", gzip.compress(b"\0")))
    assert "left out: 1 empty" in refused(write(tmp_path / "b.zip", zipped({"x": b""})))
    assert "left out: 2 null rows" in refused(write(tmp_path / "c.jsonl", jsonl([{"text": None}] * 2)))
    assert "left out: nothing" in refused(write(tmp_path / "d.parquet", parquet({"text": pa.array([], pa.string())})))
    assert refused(str(tmp_path / "nowhere")).startswith("SOURCE is ")


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


def test_a_data_set_of_the_hub_keeps_its_splits(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert (documents.single, documents.ends, documents.n_bytes) == (False, True, None)
    json.dumps(documents.identity())


def test_one_split_of_the_hub_is_divided_as_any_source(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, {"train": [{"body": "a"}]})
    assert [p.split for p in open_documents("hf:owner/name", column="body").parts()] == [None]
    assert "it has: body" in refused("hf:owner/name")
    fake_hub(monkeypatch, {"de": [], "en": []})
    assert "(it has: de, en)" in refused("hf:owner/name")
    fake_hub(monkeypatch, {"train": []})
    assert "something with text" in refused("hf:owner/name")


def test_what_can_go_wrong_with_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'linnet[datasets]'" in refused("hf:owner/name")
    assert "hf:OWNER/NAME" in refused("hf:owner/name/more")

    def no_network(*_: object, **__: object) -> None:
        raise RuntimeError("Couldn't reach the Hub.\nmore")

    fake_hub(monkeypatch, {})
    sys.modules["datasets"].load_dataset = no_network  # pyright: ignore[reportAttributeAccessIssue]
    assert "the data set 'owner/name' cannot be read (Couldn't reach the Hub)" in refused("hf:owner/name")
