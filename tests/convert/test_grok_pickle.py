"""The reader of Grok-1's pickles: exact on what the release holds, and nothing of any other file ever runs."""

from __future__ import annotations

import contextlib
import os
import pickle
import pickletools
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from grok_files import TINY_A, QuantizedWeight8bit, as_main, dump
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linnet.convert.grok.pickle_reader import StoredPair, read_pickle
from linnet.core.errors import UserError
from linnet.runs.stored_array import StoredArray

FILES = sorted((TINY_A / "ckpt-0").iterdir())


def values(found: StoredArray | StoredPair) -> list[np.ndarray]:
    return [found.weight.read(), found.scales.read()] if isinstance(found, StoredPair) else [found.read()]


def python_reads(path: Path) -> list[np.ndarray]:
    with as_main():
        found = pickle.loads(path.read_bytes())  # ours, or the goldens': files we trust
    return [found.weight, found.scales] if isinstance(found, QuantizedWeight8bit) else [found]


def same(a: list[np.ndarray], b: list[np.ndarray]) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert x.tobytes() == y.tobytes()


@pytest.mark.filterwarnings("ignore:numpy.core")
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_goldens_read_as_python_reads_them(path: Path) -> None:
    same(values(read_pickle(path)), python_reads(path))


@pytest.mark.parametrize("shape", [(1,), (3,), (70000,), (2, 3), (300, 300), (2, 3, 4), (1, 1, 2, 5)])
@pytest.mark.parametrize("pair", [False, True])
def test_arrays_of_the_installed_numpy_are_read(tmp_path: Path, shape: tuple[int, ...], pair: bool) -> None:
    generator = np.random.default_rng(0)
    value: Any = generator.normal(size=shape).astype(np.float32)
    if pair:
        weight = generator.integers(-128, 128, shape, np.int8)
        value = QuantizedWeight8bit(weight, value.astype(jnp.bfloat16))
    dump(value, tmp_path / "file")
    same(values(read_pickle(tmp_path / "file")), [value.weight, value.scales] if pair else [value])


def test_more_than_four_gigabytes_are_found_without_being_read(tmp_path: Path) -> None:
    """The file is sparse: its zeros take no room, and none of them is read."""
    n = (1 << 32) + 4
    small = pickle.dumps(np.zeros(7, np.int8), protocol=4)
    body = small[2 + 9 :]  # without protocol and frame
    payload = b"C\x07" + bytes(7)
    before, after = body.split(payload)
    shape = b"K\x07\x85"
    assert before.count(shape) == 1
    before = before.replace(shape, b"\x8a\x05" + n.to_bytes(5, "little") + b"\x85")
    with open(tmp_path / "file", "wb") as file:
        file.write(b"\x80\x04" + before + b"\x8e" + struct.pack("<Q", n))
        file.seek(n, os.SEEK_CUR)
        file.write(after)
    found = read_pickle(tmp_path / "file")
    assert isinstance(found, StoredArray)
    assert found.shape == (n,)
    assert found.nbytes == n


# Malicious files. Each would touch a file if anything in it ran.


class Bomb:
    def __init__(self, make: Any) -> None:
        self.make = make

    def __reduce__(self) -> Any:
        return self.make


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def full(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


ARRAY = named("numpy._core.multiarray", "_reconstruct") + named("numpy", "ndarray") + b"K\x00\x85C\x01b\x87R"
DTYPE = named("numpy", "dtype")


def dtype(of: bytes, order: str = "<") -> bytes:
    return DTYPE + of + b"\x89\x88\x87R(K\x03" + text(order) + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"


def array(
    shape: bytes = b"K\x01\x85", of: bytes = dtype(text("f4")), order: bytes = b"\x89", data: bytes = b"C\x04abcd"
) -> bytes:
    return ARRAY + b"(K\x01" + shape + of + order + data + b"tb"


def pair(*attributes: bytes) -> bytes:
    return named("__main__", "QuantizedWeight8bit") + b")\x81}(" + b"".join(attributes) + b"ub"


def malicious(mark: Path) -> dict[str, bytes]:
    touch = f"touch {mark}"
    code = f"open({str(mark)!r}, 'w').close()"
    os_system = pickle.dumps(Bomb((os.system, (touch,))), protocol=4)
    in_array = np.empty(1, object)
    in_array[0] = Bomb((os.system, (touch,)))
    with as_main():
        in_pair = pickle.dumps(QuantizedWeight8bit(Bomb((eval, (code,))), np.zeros(1)), protocol=4)  # pyright: ignore[reportArgumentType]
    built = ARRAY + named("builtins", "eval") + text(code) + b"\x85Rb"
    return {
        "os.system": os_system,
        "os.system, protocol 0": pickle.dumps(Bomb((os.system, (touch,))), protocol=0),
        "os.system, protocol 2": pickle.dumps(Bomb((os.system, (touch,))), protocol=2),
        "os.system, protocol 5": pickle.dumps(Bomb((os.system, (touch,))), protocol=5),
        "eval": pickle.dumps(Bomb((eval, (code,))), protocol=4),
        "object array": pickle.dumps(in_array, protocol=4),
        "in a pair": in_pair,
        "while building": full(built),
        "GLOBAL": full(b"cos\nsystem\n" + text(touch) + b"\x85R"),
        "GLOBAL of a good name": full(b"cnumpy\nndarray\n"),
        "INST": full(b"(" + text(touch) + b"ios\nsystem\n"),
        "OBJ": full(b"(" + named("os", "system") + text(touch) + b"o"),
        "OBJ of a good name": full(b"(" + named("numpy", "dtype") + text("f4") + b"o"),
        "NEWOBJ_EX": full(named("__main__", "QuantizedWeight8bit") + b")}\x92"),
        "NEWOBJ of numpy": full(named("numpy", "ndarray") + b"K\x01\x85\x85\x81"),
        "NEWOBJ of dtype": full(named("numpy", "dtype") + text("O") + b"\x85\x81"),
        "copyreg": full(named("copyreg", "_reconstructor") + named("os", "popen") + b"\x85R"),
        "extension registry": full(b"\x82\x01"),
        "extension registry 2": full(b"\x83\x01\x00"),
        "extension registry 4": full(b"\x84\x01\x00\x00\x00"),
        "persistent id": full(b"P1\n"),
        "binary persistent id": full(text("1") + b"Q"),
        "out-of-band buffer": full(b"\x97"),
        "dotted name": full(named("numpy", "ndarray.__class__")),
        "dotted module": full(named("numpy.core.multiarray.os", "system")),
        "other numpy name": full(named("numpy", "load")),
        "name that is a number": full(b"K\x01K\x02\x93"),
        "name that is a tuple": full(b"))\x93"),
        "name beyond ASCII": full(text("numpy") + b"\x8c\x02\xc3\xa9\x93"),
        "attribute beside the two": full(pair(text("weight"), array(), text("__class__"), array())),
        "attribute twice": full(pair(text("weight"), array(), text("weight"), array())),
        "one attribute": full(pair(text("weight"), array())),
        "pair of floats": full(pair(text("weight"), array(), text("scales"), array())),
        "slots state": full(named("__main__", "QuantizedWeight8bit") + b")\x81" + b"}}\x86b"),
        "state of a name": full(named("numpy", "ndarray") + b"}b"),
        "reduce of a string": full(text(touch) + b")R"),
        "reduce of an array": full(array() + b")R"),
        "dtype of objects": full(array(of=dtype(text("O"), "|"), data=b"C\x08abcdefgh")),
        "dtype of objects 2": full(array(of=dtype(text("O8"), "|"), data=b"C\x08abcdefgh")),
        "dtype of text": full(array(of=dtype(text("U1")))),
        "dtype of records": full(array(of=dtype(text("V4"), "|"))),
        "dtype with fields": full(array(of=dtype(text("f4")).replace(b"NNN", b"N}}"))),
        "dtype by a class": full(array(of=dtype(named("numpy", "ndarray")))),
        "other byte order": full(array(of=dtype(text("f4"), ">"))),
        "type without state": full(array(of=DTYPE + text("f4") + b"\x89\x88\x87R")),
        "more than it has": full(array(shape=b"J\xff\xff\xff\x7f\x85")),
        "shape that overflows": full(array(shape=(b"J\x00\x00\x00\x40" * 3 + b"\x87"))),
        "shape below 0": full(array(shape=b"J\xff\xff\xff\xff\x85")),
        "two below 0": full(array(shape=b"J\xff\xff\xff\xffJ\xff\xff\xff\xff\x86")),
        "shape with a bool": full(array(shape=b"\x88\x85")),
        "shape of 0": full(array(shape=b"K\x00\x85", data=b"C\x00")),
        "many axes": full(array(shape=b"(" + b"K\x01" * 40 + b"t")),
        "columns first": full(array(order=b"\x88")),
        "data that is text": full(array(data=text("abcd"))),
        "data that is an array": full(array(data=array())),
        "array in an array's type": full(array(of=array())),
        "array without state": full(ARRAY),
        "array built twice": full(array() + b"(K\x01K\x01\x85" + dtype(text("f4")) + b"\x89C\x04abcdtb"),
        "bytes alone": full(b"C\x04abcd"),
        "number alone": full(b"K\x01"),
        "long claims": full(b"\x8e" + struct.pack("<Q", 1 << 62)),
        "long text": full(b"X\xff\xff\xff\x7f"),
        "long number": full(b"\x8a\xff" + bytes(255)),
        "long frame": full(b"\x95" + struct.pack("<Q", 1 << 62)),
        "memo bomb": full(b")" + b"\x94h\x00h\x00\x86" * 900),
        "nested memo bomb": full(
            b")\x94" + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(200))
        ),
        "far memo": full(b")r\xff\xff\xff\x7f"),
        "far recall": full(b"j\xff\xff\xff\x7f"),
        "too many opcodes": full(b"N\x94" * 5000),
        "deep marks": full(b"(" * 900),
        "list": full(b"]"),
        "set": full(b"\x8f"),
        "pop to nothing": full(b"\x87"),
        "dup": full(array() + b"2\x86"),
        "rest after the end": full(array()) + os_system,
        "two results": full(array() + array()),
        "table of a table": full(b"}" + text("weight") + b"}s"),
        "set in a tuple": full(b")" + text("weight") + array() + b"s"),
        "unhashable key": full(b"}}" + array() + b"s"),
        "nothing": b"",
        "a script": f"#!/bin/sh\n{touch}\n".encode(),
    }


@pytest.mark.parametrize("name", list(malicious(Path("mark"))))
def test_malicious_file_is_rejected_and_not_executed(tmp_path: Path, name: str, monkeypatch: Any) -> None:
    mark, path = tmp_path / "mark", tmp_path / "file"
    path.write_bytes(malicious(mark)[name])

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("something of the file ran")

    monkeypatch.setattr(os, "system", never)
    for unpickler in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, unpickler, never)
    with pytest.raises(UserError, match="file"):
        read_pickle(path)
    assert not mark.exists()


def test_parts_of_those_files_are_good_ones(tmp_path: Path) -> None:
    """Else they would be rejected for another reason than the one that is tried."""
    (tmp_path / "file").write_bytes(full(array()))
    found = read_pickle(tmp_path / "file")
    assert isinstance(found, StoredArray)
    assert found.read().tobytes() == b"abcd"
    weight = array(of=dtype(text("i1"), "|"), data=b"C\x01a")
    scales = array(of=dtype(named("ml_dtypes", "bfloat16")), data=b"C\x02ab")
    (tmp_path / "file").write_bytes(full(pair(text("weight"), weight, text("scales"), scales)))
    assert isinstance(read_pickle(tmp_path / "file"), StoredPair)


def test_malicious_pickles_would_execute_in_python(tmp_path: Path) -> None:
    """Python's own unpickler runs them: the test above would see it."""
    for name in ("os.system", "eval", "object array", "in a pair", "GLOBAL", "INST", "OBJ", "while building"):
        mark = tmp_path / name.replace(" ", "_")
        data = malicious(mark)[name]
        with as_main(), contextlib.suppress(Exception):  # the array or the pair then is none
            pickle.loads(data)
        assert mark.exists(), name


# Damage.

SMALL = [FILES[1], FILES[5]]


def payloads(found: StoredArray | StoredPair) -> list[StoredArray]:
    return [found.weight, found.scales] if isinstance(found, StoredPair) else [found]


@pytest.mark.parametrize("path", SMALL, ids=lambda p: p.name)
def test_file_cut_short_anywhere_is_rejected(tmp_path: Path, path: Path) -> None:
    data = path.read_bytes()
    for n in range(0, len(data), 1 if len(data) < 1000 else 7):
        (tmp_path / "file").write_bytes(data[:n])
        with pytest.raises(UserError, match="file"):
            read_pickle(tmp_path / "file")


@pytest.mark.parametrize("path", SMALL, ids=lambda p: p.name)
def test_flipped_bit_outside_the_values_is_rejected_or_changes_nothing(tmp_path: Path, path: Path) -> None:
    """Inside them it cannot be told from another model: the import's checksums begin with what was read."""
    data, good = path.read_bytes(), read_pickle(path)
    inside = {i for array in payloads(good) for i in range(array.offset, array.offset + array.nbytes)}
    refused = 0
    for i in range(len(data)):
        if i in inside:
            continue
        for bit in range(8) if path == SMALL[0] else (0, 3, 5):
            spoiled = bytearray(data)
            spoiled[i] ^= 1 << bit
            (tmp_path / "file").write_bytes(spoiled)
            try:
                found = read_pickle(tmp_path / "file")
            except UserError:
                refused += 1
                continue
            same(values(found), values(good))
    assert refused > 500


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(body=st.binary(max_size=60))
def test_any_bytes_give_a_user_error(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "file").write_bytes(full(body))
    with pytest.raises(UserError):
        read_pickle(tmp_path / "file")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(data=st.data())
def test_opcodes_in_any_order_give_a_user_error_or_a_whole_array(tmp_path: Path, data: Any) -> None:
    """Pieces of good files, shuffled: an interpreter that trusts its stack would fail in other ways."""
    pieces = [
        array(),
        ARRAY,
        dtype(text("f4")),
        DTYPE,
        named("numpy", "ndarray"),
        text("weight"),
        b"}",
        b"(",
        b"t",
        b"b",
    ]
    pieces += [b"R", b"\x81", b"u", b"s", b")", b"K\x01", b"N", b"\x94", b"h\x00", b"\x85", b"\x87", b"C\x01b", b"\x93"]
    body = b"".join(data.draw(st.lists(st.sampled_from(pieces), max_size=12)))
    (tmp_path / "file").write_bytes(full(body))
    try:
        found = read_pickle(tmp_path / "file")
    except UserError:
        return
    assert [v.tobytes() for v in values(found)] == [b"abcd"]


def test_folder_or_a_missing_file_is_rejected(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="cannot be read"):
            read_pickle(path)


def test_golden_files_have_few_opcodes() -> None:
    """The bound on them is far from what real files have."""
    assert max(sum(1 for _ in pickletools.genops(path.read_bytes())) for path in FILES) < 200


@pytest.mark.parametrize(
    ("name", "words"), [("os.system", r"names \w+\.system"), ("eval", r"names builtins\.eval"), ("INST", "opcode INST")]
)
def test_rejection_names_the_requested_object(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "file").write_bytes(malicious(tmp_path / "mark")[name])
    with pytest.raises(UserError, match=words):
        read_pickle(tmp_path / "file")
