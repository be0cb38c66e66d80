"""The release's own tokenizer, which is not part of this repository: LINNET_GROK_TOKENIZER=FILE make trials."""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path

import pytest
from grok_files import GOLDENS
from sentencepiece import SentencePieceProcessor

from linnet.models.detokenize import TextAssembler
from linnet.tokenizers.base import decode_text
from linnet.tokenizers.load import open_tokenizer

pytestmark = pytest.mark.trial
FILE = os.environ.get("LINNET_GROK_TOKENIZER", "")
CASES = json.loads((GOLDENS / "tokenizer_cases.json").read_text())
needs_file = pytest.mark.skipif(not FILE, reason="LINNET_GROK_TOKENIZER names no file")


@needs_file
def test_file_is_the_released_one() -> None:
    assert hashlib.sha256(Path(FILE).read_bytes()).hexdigest() == CASES["sha256"]


@needs_file
def test_every_case_has_the_ids_and_the_text_of_sentencepiece() -> None:
    tokenizer = open_tokenizer(FILE, rules="released")
    assert tokenizer.rules == "released"
    for case in CASES["cases"]:
        assert tokenizer.encode(case["text"].encode()).tolist() == case["ids"], case["text"]
        assert decode_text(tokenizer, case["ids"]) == case["decoded"]
        text = TextAssembler(tokenizer.text_rules)
        for token in case["ids"]:
            text.feed(token)
        assert text.take()[0] + text.close() == case["decoded"]


@needs_file
def test_any_ids_stream_to_what_sentencepiece_decodes() -> None:
    tokenizer, own = open_tokenizer(FILE, rules="released"), SentencePieceProcessor(model_file=FILE)
    draw = random.Random(0)
    for _ in range(20_000):
        ids = [draw.choice([draw.randrange(600), draw.randrange(tokenizer.n_vocab)]) for _ in range(draw.randrange(9))]
        cut = draw.randrange(len(ids) + 1)
        text = TextAssembler(tokenizer.text_rules, before=ids[:cut])
        for token in ids[cut:]:
            text.feed(token)
        assert text.before + text.take()[0] + text.close() == own.decode(ids), (ids, cut)
