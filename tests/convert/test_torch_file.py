"""The .pth reader as a security boundary: hostile files end in a UserError, quickly and in little memory."""

from __future__ import annotations

import io
import os
import random
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from torch_files import Writer, mutated, repacked

from linnet.convert import torch_archive, torch_pickle
from linnet.convert.dalle2.prior import read_prior_checkpoint
from linnet.convert.torch_pickle import read_torch
from linnet.core.errors import UserError

CHECKPOINTS = Path(__file__).parents[1] / "goldens" / "prior" / "ckpt"
SECONDS, BYTES = 5.0, 1 << 30


def write(path: Path, *opcodes: bytes) -> Path:
    return Writer().save(path, b"".join(opcodes))


def refusal(path: Path) -> str:
    """The message. Time is the process's own, so that a loaded machine does not count."""
    begin = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(UserError) as caught:
            read_prior_checkpoint(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - begin < SECONDS
    assert peak < BYTES
    assert len(str(caught.value)) < 600 + len(str(path))
    return str(caught.value)


def test_nested_tuples_of_one_value_are_rejected_and_never_formatted(tmp_path: Path) -> None:
    """2**40 leaves in a few bytes: each tuple holds the one before it twice."""
    pairs = b"N" + b"".join(b"q\x00h\x00\x86" for _ in range(40))
    for use in (b"", b"Q", b"cos\n" + b"x" * 3000 + b"\n", b"}" + pairs + b"Ns", b"X\x01\x00\x00\x00a\x93"):
        refusal(write(tmp_path / "pairs.pth", pairs, use))
    name = refusal(write(tmp_path / "name.pth", b"c\x1b[2J\nsystem\n"))
    assert "\x1b" not in name


def test_deep_and_recursive_values_are_rejected(tmp_path: Path) -> None:
    assert "nested" in refusal(write(tmp_path / "deep.pth", b"N", b"\x85" * 20_000))
    assert "contains itself" in refusal(write(tmp_path / "loop.pth", b"]q\x00h\x00a"))
    inert = b"ctorch\ndevice\n)R"
    assert "contains itself" in refusal(write(tmp_path / "inert.pth", inert, b"q\x00h\x00\x85b"))


def test_number_of_opcodes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_pickle, "MAX_OPCODES", 1000)
    assert "opcodes" in refusal(write(tmp_path / "long.pth", b"N" * 1000))
    monkeypatch.setattr(torch_archive, "MAX_PICKLE", 100)
    assert "pickle" in refusal(write(tmp_path / "large.pth", b"N" * 200))


def test_keys_with_equal_hashes_are_rejected(tmp_path: Path) -> None:
    """Multiples of 2**61 - 1 all have hash 0: a dict of many would take quadratic time."""
    keys = ((i * (2**61 - 1)).to_bytes(10, "little", signed=True) for i in range(1, 20_000))
    items = b"".join(b"\x8a\x0a" + key + b"N" for key in keys)
    assert "key" in refusal(write(tmp_path / "hash.pth", b"}(", items, b"u"))


def test_tensors_that_share_a_storage_share_its_bytes(tmp_path: Path) -> None:
    writer = Writer()
    writer.tensor(np.ones(1 << 20, np.float32), (1 << 20,), (1,))
    one = writer.out.getvalue()
    writer.out = io.BytesIO()
    n = 300
    writer.out.write(b"](" + one * n + b"e")
    path = writer.save(tmp_path / "shared.pth")
    assert path.stat().st_size < 5 << 20
    tracemalloc.start()
    arrays = read_torch(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(arrays) == n
    assert peak < 5 << 20
    assert all(np.shares_memory(arrays[0], x) for x in arrays)
    with pytest.raises(ValueError, match="read-only"):
        arrays[0][0] = 2


def test_weights_larger_than_their_file_are_rejected(tmp_path: Path) -> None:
    writer = Writer()
    writer.tensor(np.ones(1 << 16, np.float32), (1 << 16,), (1,))
    one = writer.out.getvalue()
    writer.out = io.BytesIO()
    writer.out.write(b"}(")
    for name in ["learned_query", *(f"weight{i}" for i in range(20))]:
        writer.value(name)
        writer.out.write(one)
    writer.out.write(b"u")
    assert "larger than the file" in refusal(writer.save(tmp_path / "overlap.pth"))


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((0, 2**62), (1, 1)), ((0, 2**59, 2**59), (1, 1, 1)), ((1,), (2**62,)), ((2**70,), (1,)), ((True,), (1,))],
)
def test_absurd_shapes_are_rejected(tmp_path: Path, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    def number(n: int) -> bytes:
        return b"\x88" if n is True else b"\x8a\x0a" + n.to_bytes(10, "little", signed=True)

    shapes = b"".join(b"(" + b"".join(map(number, numbers)) + b"t" for numbers in (shape, strides))
    writer = Writer()
    writer.storages.append(np.ones(4))
    storage = b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQK\x00"
    path = writer.save(tmp_path / "x.pth", b"ctorch._utils\n_rebuild_tensor_v2\n" + storage + shapes + b"\x89NtR")
    assert "shape" in refusal(path)


def test_value_that_is_referred_to_often_is_measured_once(tmp_path: Path) -> None:
    """Work grows with the file, not with its square: this one took 50 minutes."""
    n = 150_000
    pickle = b"]q\0(" + b"N" * n + b"e](" + b"h\0" * n + b"e\x86"
    assert "nested too deeply" in refusal(write(tmp_path / "x.pth", pickle))


def test_storages_of_unreadable_names_and_types_are_rejected(tmp_path: Path) -> None:
    begin = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    for key in (b"]", b"}", b"N", b"X\x01\x00\x00\x007", b")"):
        refusal(write(tmp_path / "key.pth", begin, key, b"X\x03\x00\x00\x00cpuK\x04tQ"))
    refusal(write(tmp_path / "mark.pth", b"(]ctorch\nFloatStorage\nNNNtQ"))


def archive(path: Path, *members: tuple[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as made:
        for name, data in members:
            made.writestr(name, data)
    return path


def test_odd_zip_archives_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pickle = ("a/data.pkl", b"\x80\x02}.")
    full = archive(tmp_path / "whole.pth", pickle).read_bytes()
    assert read_torch(tmp_path / "whole.pth") == {}
    nameless = full.replace(b"a/data.pkl", b"\0/data.pkl")  # zipfile cuts a name at its first zero
    (tmp_path / "x.pth").write_bytes(nameless)
    assert "data.pkl" in refusal(tmp_path / "x.pth")
    bomb = archive(tmp_path / "bomb.pth", ("a/data.pkl", b"N" * (30 << 20)), compression=zipfile.ZIP_DEFLATED)
    assert "compressed" in refusal(bomb)
    with pytest.warns(UserWarning, match="Duplicate"):
        twice = archive(tmp_path / "twice.pth", pickle, pickle)
    assert "same name" in refusal(twice)
    damaged = bytearray(full)
    damaged[damaged.index(b"}.")] ^= 1
    (tmp_path / "x.pth").write_bytes(damaged)
    assert "checksum" in refusal(tmp_path / "x.pth")
    (tmp_path / "empty.pth").write_bytes(b"")
    assert "torch 1.6" in refusal(tmp_path / "empty.pth")
    assert "not a file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe.pth")  # opening it would wait for a writer
    assert "not a file" in refusal(tmp_path / "pipe.pth")
    monkeypatch.setattr(torch_archive, "MAX_DIRECTORY", 200)
    many = archive(tmp_path / "many.pth", pickle, *((f"a/data/{i}", b"") for i in range(10)))
    assert "directory" in refusal(many)


def test_members_that_overlap_are_rejected(tmp_path: Path) -> None:
    """Two directory entries for the same bytes: 20 such entries would otherwise make 20 times the file."""
    path = tmp_path / "overlap.pth"
    value = Writer()
    for _ in range(3):
        value.tensor(np.ones(1000, np.float32), (1000,), (1,))
    value.out.write(b"\x87")
    value.save(path)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as made:
        offset = made.getinfo("archive/data/0").header_offset
    at = 0
    while (at := data.find(b"PK\x01\x02", at)) >= 0:
        if b"archive/data/" in data[at + 46 : at + 46 + 14]:
            struct.pack_into("<I", data, at + 42, offset)
        at += 4
    end = data.rfind(b"PK\x05\x06")
    size, start = struct.unpack_from("<II", data, end + 12)
    del data[offset + 4100 : start]  # all but the first storage
    struct.pack_into("<I", data, data.rfind(b"PK\x05\x06") + 16, len(data) - 22 - size)
    path.write_bytes(data)
    assert "overlap" in refusal(path)


@pytest.mark.parametrize("kind", ["file", "pickle"])
@pytest.mark.parametrize("file", ["nowarmup_model", "warmup_1.1.0_checkpoint"])
def test_mutated_checkpoints_give_a_user_error_or_a_model(tmp_path: Path, file: str, kind: str) -> None:
    """A short run; the trial over every reader makes 20,000 of each."""
    draw = random.Random(f"{file} {kind}")
    full = (CHECKPOINTS / f"{file}.pth").read_bytes()
    path = tmp_path / "x.pth"
    rejection = 0
    for _ in range(60):
        path.write_bytes(mutated(full, draw) if kind == "file" else repacked(full, lambda data: mutated(data, draw)))
        try:
            read_prior_checkpoint(path)
        except UserError:
            rejection += 1
    assert rejection
