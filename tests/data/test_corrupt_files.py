"""Damaged and hostile files: the message is one sentence that names the file, and nothing large is allocated."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import embedding_files
import numpy as np
import pytest

from linnet.config import codec
from linnet.convert.npz import read_npz
from linnet.core.errors import MAX_CHARACTERS, UserError, invalid
from linnet.data import index as indexes
from linnet.data.embeddings import PairsConfig, open_pairs
from linnet.data.prepare.chunks import SplitFractions
from linnet.data.prepare.pipeline import PrepareConfig, prepare
from linnet.data.sources import npy, unpack_budget
from linnet.data.sources.documents import open_documents
from linnet.tokenizers.base import BytesTokenizer
from linnet.tokenizers.load import open_tokenizer


def header(text: bytes, version: int = 1) -> bytes:
    width = 2 if version == 1 else 4
    return npy.MAGIC + bytes((version, 0)) + len(text).to_bytes(width, "little") + text


@pytest.mark.parametrize(
    "value",
    [
        np.zeros((3, 4), np.float16),
        np.zeros((3, 4), ">f8", order="F"),
        np.array("text"),
        np.zeros(0, np.int64),
        np.zeros((2, 0, 3), bool),
        np.array([b"ab", b"c"]),
    ],
)
def test_headers_that_numpy_writes_are_read_as_numpy_reads_them(value: np.ndarray, tmp_path: Path) -> None:
    for version in ((1, 0), (2, 0), (3, 0)):
        file = io.BytesIO()
        np.lib.format.write_array(file, value, version)
        (tmp_path / "a.npy").write_bytes(file.getvalue())
        mapped = npy.map_npy(tmp_path / "a.npy")
        assert (mapped.dtype, mapped.shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(mapped, value)


@pytest.mark.parametrize(
    "text",
    [
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4",  # TokenError in numpy
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"(" * 3000 + b"), }",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,), }",
        b"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (3,), }",
        b"{'descr': '<q99', 'fortran_order': False, 'shape': (3,), }",
        b"{'descr': '<f4', 'fortran_order': 0, 'shape': (3,), }",
        b"{'descr': '<f4', 'descr': '<f4', 'shape': (3,), }",
        b"\xff\x00",
    ],
)
def test_corrupt_header_is_a_user_error(text: bytes) -> None:
    with pytest.raises(UserError, match=r"^a.npy is not an .npy array of numbers \(.*\)\. Fix: "):
        npy.read_npy_header(io.BytesIO(header(text)), "a.npy")


def test_header_that_claims_gigabytes_is_rejected_unread() -> None:
    with pytest.raises(UserError, match="claims 4,294,967,295 bytes"):
        npy.read_npy_header(io.BytesIO(npy.MAGIC + b"\x02\x00\xff\xff\xff\xff"), "a.npy")


def bomb(path: Path, n_bytes: int, name: str = "a.npy") -> Path:
    """Zeros, packed to a thousandth."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(name, "w") as member:
        file = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": (n_bytes // 32, 8)}
        )
        member.write(file.getvalue())
        for _ in range(0, n_bytes, 1 << 20):
            member.write(bytes(1 << 20))
    return path


def test_npz_bomb_is_rejected_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack_budget, "FLOOR_BYTES", 1 << 20)
    path = bomb(tmp_path / "weights.npz", 8 << 20)
    with pytest.raises(UserError, match=r"weights.npz unpacks to more than .* 100 times its packed size"):
        read_npz(path)
    assert read_npz(path, limit_gb=1)["a"].shape == ((8 << 20) // 32, 8)


def test_npz_bomb_of_embeddings_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack_budget, "FLOOR_BYTES", 1 << 20)
    path = bomb(tmp_path / "pairs.npz", 8 << 20, "img_emb.npy")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("text_emb.npy", embedding_files.npy(embedding_files.texts()))
    with pytest.raises(UserError, match=r"pairs.npz unpacks to more than"):
        open_pairs(PairsConfig(source=str(path)), 0)


def test_zip_members_without_a_name_are_a_user_error(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", embedding_files.npy(np.ones(2)))
        archive.writestr(zipfile.ZipInfo(""), b"nothing")
    with pytest.raises(UserError, match=r"a.npz:  is not an .npy array"):
        read_npz(path)


def test_empty_tar_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "a.tar").touch()
    with pytest.raises(UserError, match=r"a.tar is empty. Fix: "):
        open_pairs(PairsConfig(source=str(tmp_path / "a.tar")), 0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"family": "\xff\xfe"}', "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "is not JSON"),
    ],
)
def test_config_that_is_not_json_is_a_user_error(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=rf"config.json is not JSON .*Fix: |{words}") as error:
        codec.load(tmp_path / "config.json")
    assert words in str(error.value)


def test_corrupt_sentencepiece_model_is_rejected_silently(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.model").write_bytes(b"\n\x0e\n\x05\xab\xab\xab\xab\xab\x15\x00\x00\x00\x00\x18\x02" * 3)
    with pytest.raises(UserError, match="a sentencepiece model"):
        open_tokenizer(str(tmp_path / "a.model"))
    assert capfd.readouterr().err == ""


def test_message_never_carries_control_characters_or_a_megabyte() -> None:
    error = str(invalid("name", "x" * 10**6, "short\x1b[31m\nand plain", "rename it"))
    assert len(error) <= MAX_CHARACTERS
    assert error.isprintable()
    assert error.endswith("Fix: rename it.")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "uint8NaN"}, "its kind or its dtype is unknown"),
        ({"tokenizer": {}}, "its tokenizer is not described"),
        ({"shards": [{"file": "../../etc/passwd", "tokens": 1, "sha256": ""}]}, "a shard is not described"),
        ({"splits": {}}, "its splits are not train, validation, test"),
    ],
)
def test_index_with_impossible_values_is_rejected(change: dict[str, object], words: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for i in range(4):
        (tmp_path / "in" / f"{i}.txt").write_text("some text\n" * 20)
    source = open_documents(str(tmp_path / "in"))
    shares = SplitFractions(validation=0.3, test=0.3)
    prepare(
        PrepareConfig(source=source, tokenizer=BytesTokenizer(), fractions=shares, size=None, max_broken=0),
        tmp_path / "out",
    )
    path = tmp_path / "out" / "index.json"
    indexes.load(path.parent)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=f"index.json is damaged .{words}"):
        indexes.load(path.parent)
