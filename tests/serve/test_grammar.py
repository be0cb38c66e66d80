"""Constraints: what the mask allows always becomes a text that `json` or `re` accepts, and can end, whatever the tokenizer."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from tokenizer_files import EXACT, INEXACT, write_all

from linnet.core.errors import UserError
from linnet.serve.grammar import Grammars, Matcher
from linnet.serve.request import Constraint
from linnet.tokenizers.base import BytesTokenizer, Tokenizer
from linnet.tokenizers.load import open_tokenizer

Kind = Literal["json_schema", "regex", "lark"]
BYTES = BytesTokenizer()
GRAMMARS = Grammars(BYTES)
N_FREE = 30  # tokens drawn freely, before a walk heads for the end
N_MOST = 3000

REGEXES = [
    "",
    "a*b+c?",
    "the cat( sat)* on (the|a) mat",
    "[0-9]{3}-[0-9]{4}",
    "(漢|字|🐈){1,4}x",
    "[^a]{2,6}",
    ".{0,20}",
    r'"(\\.|[^"\\])*"',
    "a/b\n\\\\",
]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["cat", "mat", "漢"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}}}


def is_person(value: Any) -> bool:
    return (
        {"name", "age"} <= value.keys() <= {"name", "age", "tags"}
        and isinstance(value["name"], str)
        and isinstance(value["age"], int)
        and 0 <= value["age"] <= 150
        and len(value.get("tags", [])) <= 3
        and set(value.get("tags", [])) <= {"cat", "mat", "漢"}
    )


def is_tree(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 2 and all(map(is_tree, value))


SCHEMAS: list[tuple[Any, Callable[[Any], bool]]] = [
    (PERSON, is_person),
    (TREE, is_tree),
    ({"type": "number"}, lambda v: isinstance(v, int | float) and not isinstance(v, bool)),
    ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, lambda v: v is None or isinstance(v, bool)),
    ({"type": "string", "minLength": 2, "maxLength": 4}, lambda v: isinstance(v, str) and 2 <= len(v) <= 4),
    ({"type": "object"}, lambda v: isinstance(v, dict)),
    ({"const": {"a": [1, "b"]}}, lambda v: v == {"a": [1, "b"]}),
    (True, lambda v: True),
]
SUM = 'start: term ("+" term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[0-9]{1,3}/'


def constraint(kind: Kind, grammar: Any) -> Constraint:
    return Constraint(kind=kind, grammar=grammar if isinstance(grammar, str) else json.dumps(grammar))


class NoEnd(AssertionError):
    """The walk did not come to an end."""


def walk(matcher: Matcher, tokenizer: Tokenizer, draw: random.Random, closing: bytes) -> str:
    """Any allowed id at first; then the end where allowed, else one that brings it nearer: the earliest letter of `closing`."""
    ids: list[int] = []
    rank = {letter: i for i, letter in enumerate(closing)}
    while len(ids) < N_MOST:
        mask = matcher.mask()
        assert mask.any()
        allowed = [int(i) for i in np.flatnonzero(mask) if i != tokenizer.eos_id]
        if mask[tokenizer.eos_id] and (len(ids) > N_FREE or not allowed or draw.random() < 0.1):
            assert matcher.is_finished == (not allowed) or not tokenizer.exact or not ids
            matcher.advance(tokenizer.eos_id)
            assert matcher.is_finished
            return tokenizer.decode(ids).decode()  # strict: always UTF-8
        if len(ids) > N_FREE and draw.random() < 0.8:
            places = [rank.get(tokenizer.id_bytes(i)[0], len(rank)) for i in allowed]
            allowed = [i for i, place in zip(allowed, places, strict=True) if place == min(places)]
        token = draw.choice(allowed)
        matcher.advance(token)
        ids.append(token)
    raise NoEnd(f"no end: {tokenizer.decode(ids)[-200:]!r}")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    files = write_all(tmp_path_factory.mktemp("tokenizers"))
    return {name: open_tokenizer(files[name]) for name in EXACT + INEXACT}


@pytest.mark.parametrize("name", EXACT)
def test_walks_end_in_matching_text(opened: dict[str, Tokenizer], name: str) -> None:
    tokenizer = opened[name]
    grammars = Grammars(tokenizer)
    draw = random.Random(name)
    for pattern in REGEXES:
        for _ in range(4):
            text = walk(grammars.compile(constraint("regex", pattern)), tokenizer, draw, b'"xbcm')
            assert re.fullmatch(pattern, text), (pattern, text)
    for schema, is_right in SCHEMAS:
        for _ in range(4):
            text = walk(grammars.compile(constraint("json_schema", schema)), tokenizer, draw, b'"}]:,')
            assert is_right(json.loads(text)), (schema, text)
    for _ in range(4):
        text = walk(grammars.compile(constraint("lark", SUM)), tokenizer, draw, b")0")
        assert re.fullmatch("[0-9+()]+", text)
        eval(re.sub("[0-9]+", "1", text))


@pytest.mark.parametrize("name", INEXACT)
def test_vocabulary_that_does_not_cover_every_byte(opened: dict[str, Tokenizer], name: str) -> None:
    """Every step is right, also where the tokenizer would have changed the text; what cannot be spelled is rejected."""
    tokenizer = opened[name]
    grammars = Grammars(tokenizer)
    draw = random.Random(name)
    for _ in range(5):
        text = walk(grammars.compile(constraint("regex", "( the| cat)+")), tokenizer, draw, b" ")
        assert re.fullmatch("( the| cat)+", text)
        requested = '%llguidance {"no_forcing": false}\nstart: (" the" | " cat") "s"?'
        assert re.fullmatch(
            "( the| cat)s?", walk(grammars.compile(constraint("lark", requested)), tokenizer, draw, b" ")
        )
    with pytest.raises(UserError, match="can continue or end"):
        grammars.compile(constraint("regex", "漢"))
    later = grammars.compile(constraint("regex", "( the)漢"))
    with pytest.raises(UserError, match="can continue or end"):  # noqa: PT012
        while True:
            later.advance(int(np.argmax(later.mask())))


leaves = st.sampled_from(["a", "b", "é", "🐈", "[a-c]", "[^a]", ".", "[0-9]", r"\n", " "])
patterns = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "?", "+", "{0,3}", "{2}"])).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(patterns, st.integers(0, 2**32))
def test_walks_of_any_regex(pattern: str, seed: int) -> None:
    try:
        text = walk(GRAMMARS.compile(constraint("regex", pattern)), BYTES, random.Random(seed), b"")
    except NoEnd:  # "any letters, then this one": chance need not find it
        reject()
    assert re.fullmatch(pattern, text), text


def accepts(matcher: Matcher, text: str) -> bool:
    for token in BYTES.encode(text.encode()).tolist():
        if matcher.is_finished or not matcher.mask()[token]:
            return False
        matcher.advance(token)
    return bool(matcher.mask()[BYTES.eos_id])


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_matching_text_is_allowed(data: st.DataObject) -> None:
    pattern = data.draw(patterns)
    matching = data.draw(st.from_regex(pattern, fullmatch=True))
    compiled = GRAMMARS.compile(constraint("regex", pattern))
    assert accepts(compiled.copy(), matching)
    other = data.draw(st.text("abé🐈1 \n", max_size=6))
    assert accepts(compiled, other) == bool(re.fullmatch(pattern, other))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"name": "é\\n🐈", "age": 7}', True),
        ('{"name":"","age":150,"tags":["漢", "cat"]}', True),
        ('{"name":"","age":151}', False),
        ('{"name":""}', False),
        ('{"name":"","age":1,"more":1}', False),
        ('{"name":"","age":1} x', False),
    ],
)
def test_documents_of_a_schema(text: str, right: bool) -> None:
    assert accepts(GRAMMARS.compile(constraint("json_schema", PERSON)), text) == right


def test_text_after_eos_is_dropped() -> None:
    matcher = GRAMMARS.compile(constraint("regex", "ab?"))
    a, b = BYTES.encode(b"ab").tolist()
    assert np.flatnonzero(matcher.mask()).tolist() == [a]
    matcher.advance(a)
    assert np.flatnonzero(matcher.mask()).tolist() == [BYTES.eos_id, b]
    assert not matcher.is_finished
    fork, ended = matcher.copy(), matcher.copy()
    matcher.advance(b)
    assert matcher.is_finished
    assert np.flatnonzero(matcher.mask()).tolist() == [BYTES.eos_id]
    assert not fork.is_finished
    assert fork.mask()[b]
    ended.advance(BYTES.eos_id)
    assert ended.is_finished
    with pytest.raises(AssertionError, match="after the end of the text"):
        matcher.advance(a)
    with pytest.raises(AssertionError, match="not allowed here"):
        fork.advance(a)


def test_fork_diverges_independently() -> None:
    """Forked anywhere, both walk on as one that never was."""
    for n in range(12):
        draw = random.Random(n)
        matcher = GRAMMARS.compile(constraint("json_schema", PERSON))
        for _ in range(n):
            matcher.advance(draw.choice(np.flatnonzero(matcher.mask()).tolist()))
        fork, here = matcher.copy(), matcher.mask()
        walk(matcher, BYTES, random.Random(1), b'"}]:,')
        assert np.array_equal(fork.mask(), here)
        walk(fork, BYTES, random.Random(2), b'"}]:,')


def test_model_with_more_ids_than_the_tokenizer() -> None:
    matcher = Grammars(BYTES, n_vocab=384).compile(constraint("regex", "(?s).*"))
    mask, plain = matcher.mask(), GRAMMARS.compile(constraint("regex", "(?s).*")).mask()
    assert mask.shape == (384,)
    assert mask.dtype == bool
    assert not mask[259:].any()
    assert np.array_equal(mask[:259], plain)
    assert not plain[[0, 2]].any()  # pad and unknown are no text


def test_threads_compile_and_walk_independently() -> None:
    def one(seed: int) -> bool:
        schema, is_right = SCHEMAS[seed % len(SCHEMAS)]
        matcher = GRAMMARS.compile(constraint("json_schema", schema))
        return is_right(json.loads(walk(matcher, BYTES, random.Random(seed), b'"}]:,')))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(24)))
