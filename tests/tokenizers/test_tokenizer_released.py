"""Tokenizers used as released: exactly what the library of their file makes of a text, whole or piece by piece."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Literal

import pytest
from tokenizer_files import write_all

from linnet.core.errors import UserError
from linnet.models.detokenize import TextAssembler
from linnet.tokenizers.base import SETTINGS_FILE, decode_text
from linnet.tokenizers.load import open_tokenizer
from linnet.tokenizers.sentencepiece import SPACE


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_all(tmp_path_factory.mktemp("tokenizers"))


RELEASED = ["prefix", "no_fallback", "bpe", "unigram"]


@pytest.mark.parametrize("name", RELEASED)
def test_as_released_a_model_is_what_sentencepiece_makes_of_it(name: str, files: dict[str, str]) -> None:
    """Ids, the whole text, and the text piece by piece from any cut on."""
    from sentencepiece import SentencePieceProcessor

    tokenizer = open_tokenizer(files[name], rules="released")
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.fingerprint == tokenizer.fingerprint
    own = SentencePieceProcessor(model_file=files[name])
    is_ours = name in ("bpe", "unigram")
    assert (tokenizer.rules, tokenizer.exact) == (("exact", True) if is_ours else ("released", False))
    for text in ("", " ", "the cat", "  two  spaces ", "the\n\ncat ﬁnds ½ é", "▁the", "\0a", "漢🐈"):
        if not (is_ours and SPACE in text):  # which is text like any other where every byte must come back
            assert tokenizer.encode(text.encode()).tolist() == own.encode(text)
    space = own.PieceToId(SPACE)
    draw = random.Random(0)
    for _ in range(300):
        ids = [draw.choice([space, draw.randrange(own.GetPieceSize())]) for _ in range(draw.randrange(8))]
        if is_ours:  # bytes that are no text are one sign for several bytes here, as in every version
            ids = [i for i in ids if i < 3 or i > 258]
        ids = [i for i in ids if not own.IsUnknown(i) or not is_ours]
        cut = draw.randrange(len(ids) + 1)
        text = TextAssembler(tokenizer.text_rules, before=ids[:cut])
        for token in ids[cut:]:
            text.feed(token)
        assert text.before + text.take()[0] + text.close() == decode_text(tokenizer, ids) == own.decode(ids)


@pytest.mark.parametrize("name", ["gpt2", "llama", "metaspace"])
def test_as_released_a_tokenizer_json_is_what_its_package_makes_of_it(name: str, files: dict[str, str]) -> None:
    from tokenizers import Tokenizer as Package

    tokenizer, own = open_tokenizer(files[name], rules="released"), Package.from_file(files[name])
    own.no_truncation()
    own.no_padding()
    for text in ("the cat", " the cat", "  the  cat\n"):
        ids = tokenizer.encode(text.encode()).tolist()
        assert ids == own.encode(text, add_special_tokens=False).ids
        assert decode_text(tokenizer, ids) == own.decode(ids)
    assert tokenizer.fingerprint != open_tokenizer(files[name]).fingerprint


def test_text_that_continues_another_gets_no_space_in_front(files: dict[str, str]) -> None:
    tokenizer = open_tokenizer(files["prefix"], rules="released")
    full, rest = b"the cat sat on", b"at on"
    ids = [*tokenizer.encode(full[:-5]).tolist(), *tokenizer.encode(rest, continues=True).tolist()]
    assert tokenizer.decode(ids) == full
    twice = [*tokenizer.encode(full[:-5]).tolist(), *tokenizer.encode(rest).tolist()]
    assert tokenizer.decode(twice) == full[:-5] + b" " + rest


def test_rules_are_saved_and_read_back(files: dict[str, str], tmp_path: Path) -> None:
    choices: tuple[Literal["exact", "released"], ...] = ("exact", "released")
    for rules in choices:
        folder = tmp_path / rules
        folder.mkdir()
        tokenizer = open_tokenizer(files["prefix"], rules=rules)
        tokenizer.save(folder)
        assert open_tokenizer(str(folder)).fingerprint == tokenizer.fingerprint
        assert open_tokenizer(str(folder)).rules == rules
    folder = tmp_path / "released"
    (folder / SETTINGS_FILE).write_text('{"rules": "other"}')
    with pytest.raises(UserError, match="exact, released"):
        open_tokenizer(str(folder))
    (folder / SETTINGS_FILE).unlink()
    assert open_tokenizer(str(folder)).rules == "exact", "as before there was a choice"
