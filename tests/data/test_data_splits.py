"""Splits: disjoint, complete, of the sizes asked for, and the same for every seed."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linnet.config.schema import DataConfig
from linnet.core.errors import UserError
from linnet.core.special_tokens import EOS
from linnet.data import TokenDataset, load_dataset
from linnet.data.splits import SPLITS


def opened(source: Path | str, seed: int = 0, **settings: object) -> TokenDataset:
    settings = {"sequence_len": 16, "update_len": 16, "batch_size": 2, **settings}
    return load_dataset(DataConfig(source=str(source), **settings), seed)  # pyright: ignore[reportArgumentType]


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def raws(data: TokenDataset) -> dict[str, bytes]:
    return {name: data.raw(name) for name in SPLITS}


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=40),
    validation=st.floats(0, 0.45),
    test=st.floats(0, 0.45),
    seed=st.integers(0, 99),
)
def test_splits_are_disjoint_and_complete(sizes: list[int], validation: float, test: float, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # Every byte of file k is k + 1, so the splits' bytes tell whose they are.
        root = write(Path(folder), {f"{k:02}": bytes([k + 1]) * size for k, size in enumerate(sizes)})
        fractions = {"validation_fraction": validation, "test_fraction": test}
        data, again = opened(root, seed, **fractions), opened(root, seed + 1, **fractions)
    counts = {name: Counter(raw) for name, raw in raws(data).items()}
    assert sum(counts.values(), Counter()) == {k + 1: size for k, size in enumerate(sizes)}
    assert raws(again) == raws(data), "what is held out does not depend on the seed"
    assert again.fingerprint == data.fingerprint
    held_out = data.describe()["held_out"]
    if "whole files, by a hash of their names" in held_out.values():
        owners = [set(c) for c in counts.values()]
        assert sum(map(len, owners)) == len(set.union(*owners)), "a file belongs to one split"
    total = sum(sizes)
    assert data.train.n_bytes > 0
    for name, fraction in (("validation", validation), ("test", test)):
        assert (name in held_out) == (fraction > 0)
        got = data.split(name).n_bytes
        assert int(fraction * total) / 2 <= got <= 2 * fraction * total + 1e-6
    ends = len(sizes) if len(sizes) > 1 else 0
    assert sum(data.split(name).n_tokens for name in SPLITS) == total + ends, "each document ends once"


def test_one_file_is_cut_at_its_tail(tmp_path: Path) -> None:
    text = bytes(range(1, 101))
    write(tmp_path, {"a": text})
    data = opened(tmp_path / "a", validation_fraction=0.29, test_fraction=0.1)
    assert raws(data) == {"train": text[:61], "validation": text[61:90], "test": text[90:]}
    assert data.describe()["held_out"] == dict.fromkeys(("validation", "test"), "the tail of the stream")
    assert sum(data.split(s).n_tokens for s in SPLITS) == 100, "one stream has no end ids"


def test_two_files_are_too_few_for_whole_documents_so_the_tail_is_cut(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"a" * 100, "b": b"b" * 100})
    data = opened(tmp_path)
    assert raws(data) == {"train": b"a" * 100 + b"b" * 80, "validation": b"b" * 10, "test": b"b" * 10}
    assert [data.split(s).n_tokens for s in SPLITS] == [181, 10, 11]
    targets, doc_ids, _ = data.train.window(6)
    assert targets.tolist() == [ord("a") + 3] * 4 + [EOS] + [ord("b") + 3] * 11
    assert doc_ids.tolist() == [0] * 5 + [1] * 11


def test_one_giant_file_stays_in_training(tmp_path: Path) -> None:
    for giant in range(8):
        root = tmp_path / str(giant)
        write(root, {f"{k}": b"x" * (100_000 if k == giant else 1000) for k in range(40)})
        data = opened(root, validation_fraction=0.02, test_fraction=0.02)
        assert data.train.n_bytes > 100_000
        assert 1000 <= data.validation.n_bytes <= 4000
        assert data.validation.n_documents == data.validation.n_bytes // 1000


def test_named_files_are_taken_out_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a": b"aa", "b": b"b", "dev/c": b"c", "dev/d": b"d", "x/e.txt": b"e", "f": b"f"})
    write(tmp_path / "outside", {"z": b"z"})
    data = opened(
        tmp_path,
        validation_files=(str(tmp_path / "dev"), str(tmp_path / "x/*.txt"), str(tmp_path / "dev/c")),
        test_files=(str(tmp_path / "outside" / "z"),),
        validation_fraction=0.9,
        test_fraction=0.05,
    )
    assert raws(data) == {"train": b"aabf", "validation": b"cde", "test": b"z"}
    assert data.describe()["held_out"] == {"validation": "named files", "test": "named files"}
    assert [data.split(s).n_tokens for s in SPLITS] == [7, 6, 2]
    monkeypatch.chdir(tmp_path / "x")
    below_the_source = opened(tmp_path, validation_files=("dev/*",), test_files=("outside",), test_fraction=0)
    assert raws(below_the_source)["validation"] == b"cd"
    by_the_current_folder = opened(tmp_path / "a", validation_files=("e.txt",), test_fraction=0)
    assert raws(by_the_current_folder) == {"train": b"aa", "validation": b"e", "test": b""}
    assert by_the_current_folder.validation.n_tokens == 1, "training on one stream has no end ids, so nothing has"


def test_named_files_and_a_fraction(tmp_path: Path) -> None:
    write(tmp_path, {"train.txt": b"t" * 100, "valid.txt": b"v" * 50})
    data = opened(tmp_path, validation_files=("valid.txt",), test_fraction=0.1)
    assert raws(data) == {"train": b"t" * 90, "validation": b"v" * 50, "test": b"t" * 10}


def test_link_does_not_leak_held_out_text(tmp_path: Path) -> None:
    write(tmp_path, {"data/a": b"aa", "data/b": b"bb", "c": b"cc"})
    (tmp_path / "data/held").symlink_to(tmp_path / "c")
    (tmp_path / "data/hard").hardlink_to(tmp_path / "c")
    data = opened(tmp_path / "data", validation_files=(str(tmp_path / "c"),), test_fraction=0)
    assert raws(data) == {"train": b"aabb", "validation": b"cc", "test": b""}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"validation_files": ("nosuch.txt",)}, "data.validation_files is 'nosuch.txt'"),
        ({"test_files": ("a", "*.nothing")}, "data.test_files is '*.nothing'"),
        ({"validation_files": ("empty",)}, "left out: 1 empty"),
        ({"validation_files": ("a",), "test_files": ("?",)}, "names the same file"),
        ({"validation_files": ("a", "b")}, "all of its 2 files are held out"),
    ],
)
def test_bad_held_out_files_are_rejected(tmp_path: Path, settings: dict[str, tuple[str, ...]], says: str) -> None:
    write(tmp_path, {"a": b"aa", "b": b"b", "empty": b""})
    with pytest.raises(UserError) as caught:
        opened(tmp_path, 0, **settings)
    assert says in str(caught.value)
    assert "Fix: " in str(caught.value)


def test_empty_split_says_how_to_fill_it(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"tiny"})
    data = opened(tmp_path / "a", validation_fraction=0)
    with pytest.raises(UserError, match=r"the validation split is empty .* set --data.validation-fraction 0.05"):
        data.evaluation("validation", 2, None)
    with pytest.raises(UserError, match=r"test split is empty .* less than one byte .* larger source"):
        data.evaluation("test", 2, None)
    warnings = data.describe()["warnings"]
    assert "has 4 tokens, fewer than one sequence of 16" in warnings[0]
    assert warnings[1] == "The test split is empty: 0.05 of this source is less than one byte."
    assert data.batch(3).loss_mask.sum() == 8, "a text shorter than a sequence is padded"


@pytest.mark.parametrize(
    ("arguments", "says"), [(("dev", 2), "one of train"), (("train", 0), "at least 1"), (("train", 2, 0), "at least 1")]
)
def test_bad_evaluations_are_rejected_at_once(tmp_path: Path, arguments: tuple[str, int], says: str) -> None:
    write(tmp_path, {"a": b"text"})
    with pytest.raises(UserError, match=says):
        opened(tmp_path / "a").evaluation(*arguments)


def test_describe_counts(tmp_path: Path) -> None:
    write(tmp_path, {f"{k:02}": b"x" * 50 for k in range(40)})
    described = opened(tmp_path).describe()
    assert [described["splits"][s]["files"] for s in SPLITS] == [36, 2, 2]
    train = described["splits"]["train"]
    assert (train["bytes"], train["tokens"], train["windows"]) == (1800, 1836, 115)
    write(tmp_path, {"07": b"y" * 50})
    assert opened(tmp_path).describe()["fingerprint"] != described["fingerprint"]
