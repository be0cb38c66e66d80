"""Hugging Face chat templates: Jinja2 in a sandbox, rendered as transformers renders them.

Special tokens that the template writes become their ids. A special token that is spelled out in a message stays text: a character
that occurs nowhere else is inserted into it before rendering, and removed before the text is tokenized.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from linnet.core.errors import UserError, invalid
from linnet.tokenizers.base import SpecialToken, Tokenizer

MARKS = range(0xF0000, 0xFFFFE)
"""Private-use characters, one of which marks text of messages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JinjaTemplate:
    source: str
    tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Special tokens of tokenizer_config.json, such as `bos_token`, which templates refer to."""

    def check(self) -> None:
        """Raise `jinja2.TemplateError` if the template is malformed."""
        _compiled(self.source)

    def card(self) -> dict[str, str]:
        """Return the template as /v1/models shows it."""
        return {"jinja": self.source}

    def encode(
        self, messages: Sequence[tuple[str, str]], tokenizer: Tokenizer, *, last: int | None = None
    ) -> list[int]:
        """Return the prompt of (role, content) pairs. `last`: the last id of a session that these messages continue."""
        guard = _Guard(tokenizer.special_tokens, [self.source, *(content for _, content in messages)])
        guarded = [(role, guard.protect(content)) for role, content in messages]
        if last is None:
            return guard.encode(self.render(guarded, tokenizer), tokenizer, continues=False)
        ids = guard.encode(self._after_answer(guarded, tokenizer, guard.mark), tokenizer, continues=True)
        return ids[1:] if ids[:1] == [last] else ids  # the model has generated the token that ended its answer

    def stops(self, tokenizer: Tokenizer) -> tuple[tuple[str, ...], frozenset[int]]:
        """Return the strings and the ids that end an answer: EOS, and the special token that the template writes after an answer."""
        special, eos = tokenizer.special_tokens, self._variables(tokenizer)["eos_token"]
        guard = _Guard(special, [self.source])
        try:
            after = self._after_answer([("user", "x")], tokenizer, guard.mark)
        except UserError:  # the template accepts no second user message, so no session can be continued either
            after = ""
        after_answer = guard.first(after)
        ids = {special[name].id for name in (eos, after_answer) if name is not None and name in special}
        return ((eos,) if eos and eos not in special and after.startswith(eos) else ()), frozenset(ids)

    def render(self, messages: Iterable[tuple[str, str]], tokenizer: Tokenizer) -> str:
        """Render a conversation as one text that ends with the generation prompt."""
        chat = [{"role": role, "content": content} for role, content in messages]
        try:
            return _compiled(self.source).render(
                messages=chat, tools=None, documents=None, add_generation_prompt=True, **self._variables(tokenizer)
            )
        except Exception as error:  # a template may raise any error of the operations that it uses
            reason = str(error) or type(error).__name__
            needs = f"a conversation that the model's chat template accepts ({reason[:300]})"
            raise invalid(
                "messages", [role for role, _ in messages], needs, "change the roles or their order"
            ) from None

    def _variables(self, tokenizer: Tokenizer) -> dict[str, str]:
        return {"bos_token": "", "eos_token": tokenizer.pieces([tokenizer.eos_id])[0], **self.tokens}

    def _after_answer(self, messages: Iterable[tuple[str, str]], tokenizer: Tokenizer, mark: str) -> str:
        """Return what follows an answer if the conversation continues with these messages."""
        before = [("user", "x"), ("assistant", f"{mark}{mark}")]
        _, found, after = self.render([*before, *messages], tokenizer).partition(f"{mark}{mark}")
        if not found:
            needs = "omitted: the model's chat template does not repeat earlier answers"
            raise invalid("session", "given", needs, "send the whole conversation without a session")
        return after


class _Guard:
    """Finds the special tokens that the template wrote, and only those."""

    def __init__(self, special: Mapping[str, SpecialToken], texts: Sequence[str]) -> None:
        used = set().union(*texts)
        mark = next((chr(code) for code in MARKS if chr(code) not in used), None)
        if mark is None:
            raise invalid("messages", "all private-use characters", "without at least one of them", "remove one")
        self.mark = mark
        # A single character cannot be split by a mark, so it is always text.
        self._names = sorted((name for name in special if len(name) > 1), key=len, reverse=True)
        self._special = special

    def protect(self, content: str) -> str:
        """Insert marks, so that no special token is found that overlaps the content."""
        if not self._names:
            return content
        starts = re.compile(f"(?=(?:{_alternatives(self._names)}))(.)", re.DOTALL)
        lead, core, tail = _split_spaces(starts.sub(rf"\1{self.mark}", content))
        if any(core.startswith(name[i:]) for name in self._names for i in range(1, len(name))):
            core = self.mark + core
        if any(core.endswith(name[:i]) for name in self._names for i in range(1, len(name))):
            core += self.mark
        return lead + core + tail

    def first(self, text: str) -> str | None:
        """Return the special token at the start of a text."""
        return next((name for name in self._names if text.lstrip().startswith(name)), None)

    def encode(self, text: str, tokenizer: Tokenizer, *, continues: bool) -> list[int]:
        ids: list[int] = []

        def add(part: str) -> None:
            part = part.replace(self.mark, "")
            if part:
                ids.extend(tokenizer.encode(part.encode(), continues=continues or bool(ids)).tolist())

        at = 0
        for found in re.finditer(self._pattern(), text) if self._names else ():
            add(text[at : found.start()])
            assert found.lastindex is not None
            ids.append(self._special[self._names[found.lastindex - 1]].id)
            at = found.end()
        add(text[at:])
        return ids

    def _pattern(self) -> str:
        """Some special tokens take the spaces beside them."""
        space, tokens = r"\s*", ((re.escape(name), self._special[name]) for name in self._names)
        return "|".join(f"{space * token.lstrip}({name}){space * token.rstrip}" for name, token in tokens)


def _alternatives(names: Iterable[str]) -> str:
    return "|".join(map(re.escape, names))


def _split_spaces(text: str) -> tuple[str, str, str]:
    core = text.strip()
    at = text.find(core) if core else len(text)
    return text[:at], core, text[at + len(core) :]


class _Generation(Extension):
    """`{% generation %}` marks answers for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    """Compile in the environment that transformers documents for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    globals_: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
    }
    environment.globals |= globals_
    environment.filters["tojson"] = _tojson
    return environment.from_string(source)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
