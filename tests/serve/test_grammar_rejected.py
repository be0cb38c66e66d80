"""Constraints that cannot be read, are too large, or were made to be slow: rejected at once, in words, within bounds."""

from __future__ import annotations

import json
import random
import time
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linnet.core.errors import UserError
from linnet.serve.grammar import MAX_GRAMMAR_BYTES, Grammars, Matcher
from linnet.serve.request import Constraint
from linnet.tokenizers.base import BytesTokenizer

Kind = Literal["json_schema", "regex", "lark"]
BYTES = BytesTokenizer()
GRAMMARS = Grammars(BYTES)

GOOD: dict[Kind, str] = {
    "json_schema": """{"type": "object", "additionalProperties": false, "required": ["name", "age"], "properties": {"name":
 {"type": "string", "pattern": "[a-z]+"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}, "tags": {"type": "array",
 "items": {"enum": ["cat", "mat"]}, "maxItems": 3}}, "$defs": {"t": {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/t"}]}}}""",
    "regex": r"the (cat|mat)+ [^a-z]{2,6}\.?(\d*|[0-9]{3})",
    "lark": 'start: term ("+" term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[0-9]{1,3}/',
}
BAD_SCHEMAS = """
{"type":"nope"} {"type":5} {"$ref":"#/nope"} {"$ref":"http://localhost/a"} {"not":{}} {"if":{}} 5 [] null "a"
{"type":"string","pattern":"("} {"type":"string","pattern":"(?=a)"} {"minimum":"a"} {"type":"integer","minimum":5,"maximum":3}
{"enum":[]} {"items":5} {"properties":[]} {"required":5} {"anyOf":[]} {"anyOf":5} {"oneOf":5} {"allOf":5} {"multipleOf":0}
{"type":"string","minLength":-1} {"type":"string","minLength":5,"maxLength":2} {"type":"string","minLength":1.5}
{"allOf":[{"type":"string"},{"type":"integer"}]} {"type":"array","minItems":5,"maxItems":2} {"const":"\\ud800"}
{"type":"array","uniqueItems":true} {"type":"string","format":"nope"} {"minimum":NaN} {"maximum":1e999}
"""
BAD_REGEXES = r"( [ a{ * a{3,1} (?=a) (?<=a)b (a)\1 \ a\\\ [z-a] \p{Nope} (?P<n [] (?i \b (?!a) x^y \g )"
BAD_GRAMMARS = r"""
start
start: x
start: start
a: "b"
start: <pad>
start: <[0]>
start: <[1]>
start: <[99999]>
start: (
{
{"grammars":[]}
start: /(/
%import nope
%ignore
start: @x
start: %json {
start: A;A: A
start: A;A: "a" A
start: "a";start: "b"
start: "\x"
start: /a/i{
start: "a"{3,1}
start: "a"{99999999999999999999}
start: ~5
start: <any_token>
start: x // doesn't satisfy the grammar
"""


def bad_schemas() -> list[str]:
    bad, good = BAD_SCHEMAS.split(), GOOD["json_schema"]
    required = '{"type":"object","properties":{"a":%s},"required":["a"]}'
    inside = [wrap % b for b in bad for wrap in (required, '{"allOf":[%s]}', '{"anyOf":[%s]}', required % required)]
    deep = ["[" * 30_000, '{"items":' * 3000 + "{}" + "}" * 3000]
    return [*bad, *inside, *deep, *(good[:n] for n in range(len(good))), "\ud800", f"[{'0,' * MAX_GRAMMAR_BYTES}0]"]


def bad_regexes() -> list[str]:
    bad = BAD_REGEXES.split()
    return [*bad, *(f"abc(?:{b})" for b in bad), "\ud800", "(" * 5000, "a" * (MAX_GRAMMAR_BYTES + 1)]


def bad_grammars() -> list[str]:
    bad = [line.replace(";", "\n") for line in BAD_GRAMMARS.strip().splitlines()]
    return ["", "\ud800", "start: " + "(" * 9999, *bad, *(f"# a comment\n{b}" for b in bad)]


MALFORMED: dict[Kind, list[str]] = {"json_schema": bad_schemas(), "regex": bad_regexes(), "lark": bad_grammars()}


def compiled(kind: Kind, text: str) -> Matcher | str:
    """Or what is said against it."""
    try:
        return GRAMMARS.compile(Constraint(kind=kind, grammar=text))
    except UserError as error:
        return str(error)


def test_malformed_grammars_are_rejected_quickly() -> None:
    assert sum(map(len, MALFORMED.values())) >= 500
    for kind, texts in MALFORMED.items():
        for text in texts:
            begin = time.thread_time()
            said = compiled(kind, text)
            assert time.thread_time() - begin < 1, text[:200]
            assert isinstance(said, str), (kind, text[:200])
            assert said.startswith(kind), said
            assert "Fix: " in said
            assert len(said) < 600
            assert "backtrace" not in said
            said.encode()


@pytest.mark.parametrize("kind", GOOD)
def test_valid_grammars_are_accepted(kind: Kind) -> None:
    assert isinstance(compiled(kind, GOOD[kind]), Matcher)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(sorted(GOOD)), st.data())
def test_any_schema_is_accepted_or_rejected(kind: Kind, data: st.DataObject) -> None:
    """Good ones with letters lost and exchanged; and any text at all."""
    draw = data.draw(st.randoms(use_true_random=False))
    letters = list(GOOD[kind])
    for _ in range(draw.randint(1, 4)):
        letters[draw.randrange(len(letters))] = draw.choice(["", *'"{}(*\\\n9:é\0'])
    for text in ("".join(letters), data.draw(st.text(max_size=20))):
        got = compiled(kind, text)
        assert "Fix: " in got if isinstance(got, str) else got.mask().any()


@pytest.mark.parametrize(
    ("kind", "grammar"),
    [
        ("regex", "(?:a{1000}){1000}{1000}"),
        ("regex", "((((a{1,9999}){1,9999}){1,9999}){1,9999}){1,9999}"),
        ("regex", "(a|b)*a(a|b){2000}"),
        ("regex", "[a-z]" * 6000),
        ("lark", 'start: start start | "a" | ""'),
        ("lark", "start: " + " ".join(f"r{i}?" for i in range(1000)) + "".join(f'\nr{i}: "a"' for i in range(1000))),
        ("lark", "start: " + " | ".join(f"/.*a.{{{i}}}b/" for i in range(1000))),
        ("json_schema", {"properties": {f"a{i}": {"type": "string", "pattern": f".*a.{{{i}}}b"} for i in range(400)}}),
        ("json_schema", {"type": "integer", "multipleOf": 999999937}),
        ("json_schema", {"type": "array", "minItems": 10**9}),
        ("json_schema", {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(30)]}),
    ],
)
def test_work_is_bounded(kind: Kind, grammar: Any) -> None:
    """Made to be slow: it may be rejected at any step, but no step takes long."""
    begin = time.thread_time()
    matcher = compiled(kind, grammar if isinstance(grammar, str) else json.dumps(grammar))
    assert time.thread_time() - begin < 2
    draw = random.Random(0)
    for _ in range(200):
        if isinstance(matcher, str) or matcher.is_finished:
            break
        begin = time.thread_time()
        matcher = step(matcher, draw)
        assert time.thread_time() - begin < 1


def step(matcher: Matcher, draw: random.Random) -> Matcher | str:
    try:
        matcher.advance(draw.choice(np.flatnonzero(matcher.mask()).tolist()))
    except UserError as error:
        return str(error)
    return matcher


def test_memory_is_bounded() -> None:
    """Of 2^20 states this regex would make one a letter, and keep it; a long text in few states continues for ever."""
    letters = random.Random(0).choices(BYTES.encode(b"ab").tolist(), k=6000)
    growing = GRAMMARS.compile(Constraint(kind="regex", grammar="(a|b)*a(a|b){20}"))
    with pytest.raises(UserError, match="too many"):  # noqa: PT012
        for token in letters:
            growing.advance(token)
    steady = GRAMMARS.compile(Constraint(kind="json_schema", grammar='{"type":"array","items":{"enum":["aba","b"]}}'))
    for token in BYTES.encode(b"[" + b'"aba", "b",' * 3000).tolist():
        steady.advance(token)
    assert steady.mask()[BYTES.encode(b'"')[0]]
