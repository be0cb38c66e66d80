"""Tokenizers: every byte string comes back, no text becomes a control id, and what cannot be used is rejected in words."""

from __future__ import annotations

import itertools
import json
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import EXACT, INEXACT, ODD, sentencepiece, write_all

from linnet.cli.tokenizer import tokenizer_command
from linnet.core.errors import UserError
from linnet.data.prepare.train_tokenizer import sample_evenly, split_blocks, train_sentencepiece, trainer_lines
from linnet.data.sources.documents import DocumentPart
from linnet.tokenizers.base import Tokenizer
from linnet.tokenizers.huggingface import byte_letters
from linnet.tokenizers.load import open_tokenizer
from linnet.tokenizers.pieces import LONGEST_BLOCK_CHARS, blocks, lines, words
from linnet.tokenizers.sentencepiece import open_sentencepiece


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_all(tmp_path_factory.mktemp("tokenizers"))


@pytest.fixture(scope="module")
def opened(files: dict[str, str]) -> dict[str, Tokenizer]:
    return {name: open_tokenizer(files[name]) for name in EXACT + INEXACT}


@pytest.mark.parametrize("name", EXACT)
def test_odd_bytes_come_back(opened: dict[str, Tokenizer], name: str) -> None:
    tokenizer = opened[name]
    assert tokenizer.exact
    for data in ODD:
        ids = tokenizer.encode(data)
        assert ids.dtype == np.int32
        assert tokenizer.decode(ids) == data
        assert tokenizer.eos_id not in ids
        assert all(tokenizer.id_bytes(i) for i in set(ids.tolist())), "an id without bytes in a text"
        assert tokenizer.lengths()[ids].sum() == len(data)


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=60, deadline=None)
@given(
    data=st.binary(max_size=60)
    | st.text(max_size=40).map(str.encode)
    | st.lists(st.sampled_from(ODD[:10])).map(b"".join)
)
def test_any_bytes_come_back(opened: dict[str, Tokenizer], name: str, data: bytes) -> None:
    assert opened[name].decode(opened[name].encode(data)) == data


@pytest.mark.parametrize("name", ["bpe", "unigram", "prefix", "gpt2", "llama"])
def test_odd_byte_spoils_one_word_only(opened: dict[str, Tokenizer], name: str) -> None:
    tokenizer = opened[name]
    clean = b"the cat sat on the cat\n" * 20
    spoilt = clean + b"the cat \xff sat on" + b"\nthe cat sat on the cat" * 20
    assert len(tokenizer.encode(clean)) < len(clean) / 1.5, "pieces, not bytes: a prefix space must not spoil the lines"
    assert len(tokenizer.encode(spoilt)) < 2 * len(tokenizer.encode(clean)) + 20


@pytest.mark.parametrize(("name", "first_byte"), [("prefix", 3), ("llama", 3), ("metaspace", 2)])
def test_text_without_a_space_before_it_is_made_of_pieces(
    opened: dict[str, Tokenizer], name: str, first_byte: int
) -> None:
    ids = opened[name].encode(b"the cat\nthe cat")
    assert [i for i in ids.tolist() if first_byte <= i < first_byte + 256] == [first_byte + 10]


def test_text_that_looks_like_a_control_token_is_ordinary_text(opened: dict[str, Tokenizer]) -> None:
    tokenizer = opened["gpt2"]
    assert len(tokenizer.encode(b"<pad>bridge")) == len(tokenizer.encode(b"<pad>")) + len(tokenizer.encode(b"bridge"))
    assert len(tokenizer.encode(b"bridge")) < 6


@pytest.mark.parametrize("name", INEXACT)
def test_lossy_tokenizer_is_reported_and_usable(opened: dict[str, Tokenizer], name: str) -> None:
    tokenizer = opened[name]
    assert not tokenizer.exact
    for data in [*ODD, b"the [SEP] cat </s>"]:
        assert tokenizer.eos_id not in tokenizer.encode(data)
    assert len(tokenizer.encode(b"the cat " * 40)) >= 80, "a model's own truncation must not count"
    assert tokenizer.decode(tokenizer.encode(b"the cat")).strip() == b"the cat"


def test_word_piece_prefixes(opened: dict[str, Tokenizer]) -> None:
    assert [opened["wordpiece"].id_bytes(i) for i in range(7)] == [b"", b"", b"", b" the", b" cat", b"s", b" </s>"]


@pytest.mark.parametrize("name", EXACT + INEXACT)
def test_every_id_can_be_decoded_and_named(opened: dict[str, Tokenizer], name: str) -> None:
    tokenizer = opened[name]
    every = range(tokenizer.n_vocab)
    assert tokenizer.decode(every) == b"".join(map(tokenizer.id_bytes, every))
    assert tokenizer.lengths().tolist() == [len(tokenizer.id_bytes(i)) for i in every]
    assert all(tokenizer.pieces(every))
    assert tokenizer.id_bytes(tokenizer.eos_id) == b""
    beyond = [-1, tokenizer.n_vocab, 10**9]
    assert tokenizer.decode(beyond) == b""
    assert len(tokenizer.pieces(beyond)) == 3


@pytest.mark.parametrize("name", EXACT + INEXACT)
def test_saved_and_pickled_forms_are_equal(opened: dict[str, Tokenizer], name: str, tmp_path: Path) -> None:
    tokenizer = opened[name]
    tokenizer.save(tmp_path / "run")
    for other in (open_tokenizer(str(tmp_path / "run")), pickle.loads(pickle.dumps(tokenizer))):
        assert (other.kind, other.fingerprint) == (tokenizer.kind, tokenizer.fingerprint)
        assert other.encode(ODD[7]).tolist() == tokenizer.encode(ODD[7]).tolist()


def test_saving_to_an_unwritable_path_is_rejected(opened: dict[str, Tokenizer], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full" / "tokenizer.bytes").mkdir(parents=True)
    for folder in ("file", "full"):
        with pytest.raises(UserError, match="cannot be written"):
            opened["bytes"].save(tmp_path / folder)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["tokenizer.bytes"], "nothing half-written stays"


def test_fingerprints_distinguish_content_and_eos(opened: dict[str, Tokenizer], files: dict[str, str]) -> None:
    assert len({tokenizer.fingerprint for tokenizer in opened.values()}) == len(opened)
    assert open_tokenizer(files["gpt2"], end_token="<pad>").fingerprint != opened["gpt2"].fingerprint


@pytest.mark.parametrize(("name", "token"), [("gpt2", "<pad>"), ("llama", "▁the"), ("bpe", "at")])
def test_chosen_end_token_is_kept_and_never_in_a_text(
    files: dict[str, str], name: str, token: str, tmp_path: Path
) -> None:
    tokenizer = open_tokenizer(files[name], end_token=token)
    assert tokenizer.pieces([tokenizer.eos_id]) == [token]
    data = b"on the cat <pad> the cat at hat"
    assert tokenizer.eos_id not in tokenizer.encode(data)
    assert tokenizer.decode(tokenizer.encode(data)) == data
    tokenizer.save(tmp_path)
    assert open_tokenizer(str(tmp_path)).fingerprint == tokenizer.fingerprint


def test_bytes_are_what_the_models_know(opened: dict[str, Tokenizer]) -> None:
    tokenizer = opened["bytes"]
    assert tokenizer.encode(b"\x00a\xff").tolist() == [3, 100, 258]
    assert (tokenizer.n_vocab, tokenizer.eos_id) == (259, 1)
    assert tokenizer.pieces([0, 1, 2, 100, 13, 258]) == ["<pad>", "<end>", "<unknown>", "a", "<0x0A>", "<0xFF>"]


def test_trained_models_have_the_references_layout(files: dict[str, str], opened: dict[str, Tokenizer]) -> None:
    from sentencepiece import SentencePieceProcessor

    for name, n in (("bpe", 340), ("unigram", 300)):
        tokenizer = opened[name]
        assert (tokenizer.n_vocab, tokenizer.eos_id) == (n, 1)
        assert tokenizer.pieces([0, 1, 2]) == ["<pad>", "</s>", "<unk>"]
        assert [tokenizer.id_bytes(i + 3) for i in range(256)] == [bytes([i]) for i in range(256)]
        processor = SentencePieceProcessor(model_file=files[name])
        assert processor.Normalize("ﬁ  ½ ") == "ﬁ▁▁½▁", "nothing is normalised, added or taken away"


def test_letters_of_bytes_are_those_of_the_package() -> None:
    from tokenizers import pre_tokenizers

    assert sorted(byte_letters()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert [byte_letters()[letter] for letter in "aĠĊé"] == [97, 32, 10, 0xE9]


@settings(deadline=None)
@given(st.text(alphabet="ab \n\t\udc80é\x85\u2028", max_size=60).map(lambda unit: unit * 3000))
def test_splitting_loses_nothing(text: str) -> None:
    for cut in (blocks, lines, words):
        assert "".join(cut(text)) == text
    assert all(0 < len(block) <= LONGEST_BLOCK_CHARS for block in blocks(text))


def test_blocks_begin_where_lines_begin() -> None:
    text = "    indented\nline of text\n\n" * 8000
    assert {block.splitlines()[0] for block in blocks(text)[1:]} == {"line of text"}


def test_training_is_deterministic(files: dict[str, str], opened: dict[str, Tokenizer], tmp_path: Path) -> None:
    for model, size in (("bpe", "340"), ("unigram", "300")):
        argv = ["train", files["text"], "--out", str(tmp_path / model), "--vocab-size", size, "--model", model]
        assert tokenizer_command(argv) == 0
        assert open_tokenizer(str(tmp_path / model)).fingerprint == opened[model].fingerprint


def test_training_reads_a_column_and_counts_what_it_leaves_out(
    files: dict[str, str], opened: dict[str, Tokenizer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"body": line, "other": "zzz"} for line in Path(files["text"]).read_text().split("\n")]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in [*rows, {"body": None}]))
    argv = ["train", str(tmp_path / "rows.jsonl"), "--column", "body", "--vocab-size", "340", "--out", str(tmp_path)]
    tokenizer_command(argv)
    assert open_tokenizer(str(tmp_path)).fingerprint == opened["bpe"].fingerprint
    assert "left out: 1" in capsys.readouterr().err
    assert "--column" in rejection([*argv[:2], "--out", str(tmp_path / "b"), "--column", "none"])


def test_training_does_not_read_held_out_data(monkeypatch: pytest.MonkeyPatch) -> None:
    class Divided:
        left_out: ClassVar = Counter[str]()

        def parts(self) -> Iterator[DocumentPart]:
            for split, data in (("train", b"ab ab"), ("validation", b"XY XY"), ("test", b"XY XY")):
                yield DocumentPart(split, data, True, True, split, 0)

    monkeypatch.setattr("linnet.data.prepare.train_tokenizer.open_documents", lambda source, **options: Divided())
    content = train_sentencepiece(["any"], vocab_size=263, model="bpe", sample_bytes=1000)
    assert open_sentencepiece(content).pieces(range(259, 263)) == ["ab", "a", "b", " "]


@given(st.lists(st.binary(max_size=30)), st.integers(1, 40))
def test_segments_are_short_and_lose_nothing(parts: list[bytes], longest: int) -> None:
    found = list(split_blocks(parts, longest))
    assert b"".join(found) == b"".join(parts)
    assert all(0 < len(stretch) <= longest for stretch in found)
    assert list(split_blocks([b"one\ntwo\nthree"], 9)) == [b"one\ntwo\n", b"three"]


@given(st.integers(0, 3000), st.integers(7, 5000))
def test_sample_is_spread_over_all_the_text(n: int, most: int) -> None:
    kept = [int(item) for item in sample_evenly((b"%07d" % i for i in range(n)), most)]
    assert 7 * len(kept) <= most
    if 7 * n <= most:
        assert kept == list(range(n))
    else:
        assert 7 * len(kept) >= most / 2 - 7
        assert len({b - a for a, b in itertools.pairwise(kept)}) <= 1, "evenly"
        assert kept[0] == 0
        assert len(kept) == 1 or kept[-1] + (kept[1] - kept[0]) >= n


def test_no_text_is_left_out_of_training() -> None:
    found = list(trainer_lines(b"one\ttwo\xffthree " + b"word " * 3000 + b"y" * 5000 + b"\nlast"))
    assert "".join(found).replace(" ", "") == "onetwothree" + "word" * 3000 + "y" * 5000 + "last"
    assert max(len(text.encode()) for text in found) <= 4192


def rejection(argv: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        tokenizer_command(argv)
    return str(caught.value)


def test_training_rejects_invalid_settings(files: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "tabs.txt").write_bytes(b"\t\t\xff\n\n")
    out = ["--out", str(tmp_path / "new")]
    text = files["text"]
    assert "SOURCE" in rejection(["train", str(tmp_path / "empty.txt"), *out])
    assert "SOURCE" in rejection(["train", str(tmp_path / "tabs.txt"), *out])
    assert "SOURCE" in rejection(["train", str(tmp_path / "none.txt"), *out])
    assert "more than 259" in rejection(["train", text, *out, "--vocab-size", "259"])
    assert "at least 28" in rejection(["train", text, *out, "--vocab-size", "265"])
    too_large = rejection(["train", text, *out, "--vocab-size", "100000"])
    most = too_large.split("at most ")[1].split()[0]
    assert tokenizer_command(["train", text, *out, "--vocab-size", most]) == 0, "what a refusal offers must work"
    assert "--out" in rejection(["train", text, *out, "--vocab-size", most])
    assert "--out" in rejection(["train", text, "--out", text + "/x"])
    assert "--sample-bytes" in rejection(["train", text, "--out", str(tmp_path / "b"), "--sample-bytes", "0"])
    assert "train or show" in rejection(["trian"])


def test_loading_rejects_invalid_settings(files: dict[str, str], tmp_path: Path) -> None:
    bad = {
        "none.model": None,
        "text.model": b"this is a text",
        "short.model": Path(files["bpe"]).read_bytes()[:-200],
        "empty.json": b"",
        "half.json": Path(files["gpt2"]).read_bytes()[:500],
        "config.json": b'{"vocab_size": 3}',
        "model.json": b'{"model": {"type": "?"}}',
    }
    for name, content in bad.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match="--tokenizer.*Fix:"):
            open_tokenizer(str(tmp_path / name))
    with pytest.raises(UserError, match=r"--tokenizer.*tokenizer\.bytes"):
        open_tokenizer(str(tmp_path))
    open_tokenizer("bytes").save(tmp_path)
    open_tokenizer(files["gpt2"]).save(tmp_path)
    with pytest.raises(UserError, match="one tokenizer"):
        open_tokenizer(str(tmp_path))


def test_end_token_must_be_known(files: dict[str, str], tmp_path: Path) -> None:
    spec = json.loads(Path(files["gpt2"]).read_text())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] != "<|endoftext|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "no_end.model").write_bytes(sentencepiece(model_type="bpe", byte_fallback=True, eos_id=-1))
    for name in ("tokenizer.json", "no_end.model"):
        with pytest.raises(UserError, match="--end-token"):
            open_tokenizer(str(tmp_path / name))
    assert open_tokenizer(str(tmp_path), end_token="<pad>").eos_id == 1
    for name in ("gpt2", "bpe", "bytes"):
        with pytest.raises(UserError, match="--end-token is '<nothing>'"):
            open_tokenizer(files[name], end_token="<nothing>")


def test_show_prints_examples(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer_command(["show", "the cat\n", "--tokenizer", files["llama"], "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["pieces"] == ["t", "h", "e", " cat", "<0x0A>"]
    assert shown["comes_back"]
    assert shown["end"] == {"id": 2, "piece": "</s>"}
    tokenizer_command(["show", "a\udcff"])
    out = capsys.readouterr().out
    assert "'a'" in out
    assert "258  '<0xFF>'" in out
    assert "2 bytes, 2 ids, comes back exactly" in out
    tokenizer_command(["show", "the dog", "--tokenizer", files["wordpiece"]])
    assert "does NOT come back" in capsys.readouterr().out
