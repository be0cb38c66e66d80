"""Schemas, regular expressions and grammars that are malformed or made to be slow, sent to an engine at work: each is rejected at once
or bounded in its work, and a neighbour that runs all the while has the bits it has alone."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from engine_requests import PendingRequest, ask, plain, request, running_engine

from linnet.core.errors import UserError
from linnet.serve.grammar import MAX_GRAMMAR_BYTES
from linnet.serve.request import Constraint

SECONDS = 1.0
"""To reject one, at the most; on a busy machine."""

GOOD_SCHEMA = json.dumps(
    {"type": "object", "properties": {"name": {"type": "string", "pattern": "[a-z]+"}, "n": {"enum": [1, 2.5, None]}}}
)
WRONG: dict[str, list[Any]] = {
    "type": [5, "text", [5], ["nope"], {}, True, []],
    "properties": [5, "x", [], None, True],
    "required": [5, "x", {}, True, [5]],
    "items": [5, "x", None],
    "enum": [5, "x", {}, []],
    "anyOf": [5, "x", {}, [], [5]],
    "oneOf": [5, "x", {}, [], [5]],
    "allOf": [5, "x", {}, [5]],
    "minimum": ["x", [], {}, True],
    "minLength": [-1, 1.5, "x", []],
    "maxItems": [-1, 1.5, "x", {}],
    "pattern": [5, "(", "(?=a)", "[z-a]"],
    "format": [5, "nope"],
    "multipleOf": [0, "x"],
    "$ref": [5, "#/nope", "#/$defs/nope", "http://localhost/schema", "file:///etc/passwd", "#"],
    "not": [{}, {"type": "string"}],
}
IMPOSSIBLE: list[dict[str, Any]] = [
    {"type": "integer", "minimum": 5, "maximum": 3},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "array", "minItems": 5, "maxItems": 2},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
]
BAD_REGEXES = [
    "(",
    ")",
    "[",
    "a{3,1}",
    "*",
    "(?=a)",
    "(?!a)",
    "(?<=a)b",
    r"(a)\1",
    "[z-a]",
    r"\p{Nope}",
    r"\xZZ",
    "(?<n",
]
BAD_RULES = ["undefined", "(", '"open', "/open", "%json {", '"a"{3,1}', "<[99999]>", "UNDEFINED", "@x", '"\\x"']
NOT_UNICODE = ["\ud800", "\udfff", "\udc80\udcff"]  # lone surrogates: what bytes that are no UTF-8 become, if anything
SLOW = [
    ("regex", "(a+)+b"),
    ("regex", "(a|aa)*b"),
    ("regex", "(.*a){20}"),
    ("regex", "((a{1,100}){1,100}){1,100}"),
    ("regex", "(a?){5000}a{5000}"),
    ("regex", "a{99999}"),
    ("regex", "|".join(f"word{i}" for i in range(3500))),
    ("regex", "(a|b)*a(a|b){20}"),
    ("json_schema", json.dumps({"anyOf": [{"const": str(i)} for i in range(1500)]})),
    ("json_schema", json.dumps({"type": "array", "minItems": 10**12})),
    ("json_schema", json.dumps({"type": "string", "minLength": 10**9})),
    ("json_schema", '{"$ref":"#/$defs/a","$defs":{"a":{"type":"array","minItems":1,"items":{"$ref":"#/$defs/a"}}}}'),
    ("lark", 'start: start start | "a" | ""'),
    ("lark", "start: " + "|".join(f'"word{i}"' for i in range(2500))),
    ("lark", 'start: a{5}\na: b{100}\nb: c{1000}\nc: "x"'),
]


def malformed(n: int) -> Iterator[tuple[str, str]]:
    """The fixed ones first in random order, then as many as are asked for of those that can be made without end."""
    draw = random.Random(11)
    schemas = [json.dumps({keyword: value}) for keyword, values in WRONG.items() for value in values]
    schemas += map(json.dumps, IMPOSSIBLE)
    within = '{"type":"object","properties":{"a":%s},"required":["a"]}'
    schemas += [within % schema for schema in schemas if "$ref" not in schema]
    schemas += [
        "[" * 30_000,
        '{"items":' * 3000 + "{}" + "}" * 3000,
        '{"allOf":[' * 900 + "{}" + "]}" * 900,
        "5",
        "null",
    ]
    schemas += [f'{{"const":"{letters}"}}' for letters in NOT_UNICODE]
    fixed = [("json_schema", schema) for schema in schemas]
    fixed += [("regex", text) for text in (*BAD_REGEXES, *NOT_UNICODE, "(" * 9000, "a" * (MAX_GRAMMAR_BYTES + 1))]
    fixed += [("lark", f"start: {rule}") for rule in (*BAD_RULES, *NOT_UNICODE, "(" * 9000)]
    fixed += [
        ("lark", text) for text in ("", "start", 'a: "b"', "start: start", "start: a\na: start", '{"grammars":[]}')
    ]
    draw.shuffle(fixed)
    yield from fixed[:n]
    for _ in range(n - len(fixed)):
        word = "".join(draw.choices("abcdefgh", k=draw.randint(1, 30)))
        yield draw.choice(
            [
                ("json_schema", GOOD_SCHEMA[: draw.randrange(len(GOOD_SCHEMA))]),
                ("json_schema", json.dumps({"type": word})),
                ("json_schema", json.dumps({"$ref": f"#/$defs/{word}"})),
                ("json_schema", within % within % json.dumps({"type": "string", "pattern": f"{word}("})),
                ("regex", word + draw.choice(BAD_REGEXES[:3]) + word),
                ("regex", f"({word}|{draw.choice(BAD_REGEXES)})" if draw.random() < 0.5 else f"{word}\\"),
                ("lark", f'start: "{word}" {draw.choice(BAD_RULES)}'),
                ("lark", f"start: {word}"),
                ("lark", f"%import {word}\nstart: {word}"),
            ]
        )


@pytest.mark.slow
@pytest.mark.parametrize("n", [100, pytest.param(500, marks=pytest.mark.trial)], ids=["quick", "full"])
def test_malformed_grammars_are_rejected_and_the_engine_survives(n: int) -> None:
    bad = list(malformed(n))
    assert len(bad) == n
    worst = 0.0
    with running_engine(n_slots=3) as engine:
        endless = PendingRequest(engine, request("endless", max_tokens=10**6))
        for kind, text in bad:
            constraint: Any = Constraint(kind=kind, grammar=text)  # pyright: ignore[reportArgumentType]
            begin = time.perf_counter()
            with pytest.raises(UserError, match="Fix: "):
                PendingRequest(engine, request("x", constraint=constraint))
            worst = max(worst, time.perf_counter() - begin)
        stats = engine.stats()
        assert (stats["running"], stats["waiting"]) == (1, 0)
        engine.cancel(endless.request.id)
        answer, again = endless.answer(), request("x", seed=3)
        assert answer.tokens[:300] == plain(request("endless", max_tokens=300))[0][: len(answer.tokens)]
        assert PendingRequest(engine, again).answer().tokens == plain(again)[0]
    print(f"{n} refused, the slowest in {worst:.3f} s")
    assert worst < SECONDS


def test_slow_grammars_are_rejected_or_stay_within_the_tick() -> None:
    """Those that are legal run beside a neighbour: it is never held up long, and stays the same."""
    with running_engine(n_slots=3) as engine:
        ask(engine, "warm", constraint=Constraint(kind="regex", grammar="a+"))
        for kind, text in SLOW:
            constraint: Any = Constraint(kind=kind, grammar=text)  # pyright: ignore[reportArgumentType]
            neighbour = request("neighbour", seed=8, max_tokens=30)
            begin = time.perf_counter()
            try:
                requested = PendingRequest(engine, request("x", constraint=constraint, max_tokens=30, ignore_eos=False))
            except UserError:
                pass
            else:
                beside = PendingRequest(engine, neighbour)
                assert requested.answer().end.reason in ("length", "stop", "stuck")
                assert beside.answer().tokens == plain(neighbour)[0]
            assert time.perf_counter() - begin < 10 * SECONDS, (kind, text[:100])


@pytest.mark.trial
def test_grammar_that_grows_too_large_on_its_way_ends_alone() -> None:
    """Almost every letter makes another state of this one, until there are too many of them."""
    grows = Constraint(kind="regex", grammar="(a|b)*a(a|b){20}")
    neighbour = request("neighbour", seed=9, max_tokens=20_000)
    with running_engine(n_slots=2) as engine:
        beside = PendingRequest(engine, neighbour)
        answer = ask(engine, "x", constraint=grows, max_tokens=20_000, banned=frozenset({1}), temperature=2.0)
        assert answer.end.reason == "stuck"
        assert "too many" in (answer.end.error or "")
        assert beside.answer(timeout=300).tokens == plain(neighbour)[0]
