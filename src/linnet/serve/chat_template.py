"""A run's chat template: how a conversation becomes a prompt, and what ends the answer.

A run may have one of its own: `chat_template.json`, which is data without code and is tokenized as plain text (no special tokens);
or one of Hugging Face, in `chat_template.jinja` or in `tokenizer_config.json` (`serve/jinja_template.py`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from linnet.core.errors import UserError, invalid
from linnet.core.files import parse_json
from linnet.serve.jinja_template import JinjaTemplate
from linnet.serve.request import MAX_STOP_BYTES, MAX_STOPS
from linnet.tokenizers.base import Tokenizer

FILE, JINJA_FILE, CONFIG_FILE = "chat_template.json", "chat_template.jinja", "tokenizer_config.json"
MAX_BYTES = 1 << 16
MAX_CONFIG_BYTES = 1 << 24
ROLES = ("system", "developer", "user", "assistant")
REQUIRED_ROLES = ("user", "assistant")
FIELDS = ("beginning", "roles", "answer", "stop", "between")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapping:
    """Text before and after a message."""

    prefix: str
    suffix: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    beginning: str
    """Text before the first message of a conversation."""
    roles: Mapping[str, Wrapping]
    answer: str
    """Generation prompt: text after the last message, before the model's answer."""
    stop: tuple[str, ...]
    """Stop strings: each ends an answer and is not part of it."""
    between: str
    """Text between an answer and the next message of a session. A stop string that ended the answer has already been read."""

    def encode(
        self, messages: Sequence[tuple[str, str]], tokenizer: Tokenizer, *, last: int | None = None
    ) -> list[int]:
        """Return the prompt of (role, content) pairs. `last`: the last id of a session that these messages continue."""
        text = self.text(messages, continues=last is not None)
        return tokenizer.encode(text.encode(), continues=last is not None).tolist()

    def stops(self, tokenizer: Tokenizer) -> tuple[tuple[str, ...], frozenset[int]]:
        """Return the strings and the ids that end an answer."""
        return self.stop, frozenset()

    def card(self) -> dict[str, Any]:
        """Return the template in the format of `chat_template.json`."""
        return {**dataclasses.asdict(self), "stop": list(self.stop)}

    def text(self, messages: Iterable[tuple[str, str]], *, continues: bool) -> str:
        """Render (role, content) pairs as one text. `continues`: the text continues a session that is not empty."""
        parts = [self.between if continues else self.beginning]
        for role, content in messages:
            wrapping = self._wrapping(role)
            parts += [wrapping.prefix, content, wrapping.suffix]
        return "".join([*parts, self.answer])

    def _wrapping(self, role: str) -> Wrapping:
        wrapping = self.roles.get(role) or (self.roles.get("system") if role == "developer" else None)
        if wrapping is None:
            raise invalid(
                "the role of a message",
                role,
                f"one of {', '.join(self.roles)} for this model",
                "use one of these roles",
            )
        return wrapping


PLAIN = ChatTemplate(
    beginning="",
    roles={role: Wrapping(prefix=f"{role}: ", suffix="\n") for role in ROLES},
    answer="assistant:",
    stop=(),
    between="\n",
)
"""One line per message, followed by the start of the answer's line."""


Template = ChatTemplate | JinjaTemplate


def read_template(folder: Path) -> Template:
    """Read and validate a run's own template; return the plain one if it has none."""
    if (folder / FILE).exists():
        return _TemplateReader(folder / FILE).template()
    path = folder / CONFIG_FILE
    config = parse_config(path, _read(path, MAX_CONFIG_BYTES)) if path.exists() else {}
    source = named_template(path, config.get("chat_template"))
    if (folder / JINJA_FILE).exists():
        path = folder / JINJA_FILE
        source = _decode(path, _read(path, MAX_BYTES))
    if source is None:
        return PLAIN
    template = JinjaTemplate(source=source, tokens=special_tokens(config))
    try:
        template.check()
    except jinja2.TemplateError as error:
        raise invalid(str(path), str(error)[:200], "a Jinja chat template", "correct it, or remove it") from None
    return template


def parse_config(path: Path, data: bytes) -> dict[str, Any]:
    try:
        config = parse_json(data)
    except ValueError as error:
        raise invalid(str(path), str(error)[:200], "JSON", "restore it, or remove it") from None
    if not isinstance(config, dict):
        raise invalid(str(path), type(config).__name__, "an object of settings", "restore it, or remove it")
    return config


def named_template(path: Path, value: Any) -> str | None:
    """Return the template of a tokenizer_config.json: a string, or the one called `default` in a list of named templates."""
    if isinstance(value, list):
        named = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
        if "default" not in named:
            needs = (
                f"a string, or a list with a template named 'default' (it has {', '.join(map(str, named)) or 'none'})"
            )
            raise invalid(f"{path}: chat_template", "a list", needs, f"write the template to {JINJA_FILE}")
        value = named["default"]
    if value is not None and not isinstance(value, str):
        raise invalid(f"{path}: chat_template", value, "a string or a list of named templates", "correct it")
    return value


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a tokenizer_config.json, which are strings or objects with `content`."""
    values = {name: one.get("content") if isinstance(one, dict) else one for name, one in config.items()}
    return {name: one for name, one in values.items() if name.endswith("_token") and isinstance(one, str)}


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise invalid(str(path), error.strerror, "a readable file", "check its permissions") from None
    if len(data) > max_bytes:
        raise invalid(f"the size of {path}", len(data), f"at most {max_bytes} bytes", "shorten it")
    return data


def _decode(path: Path, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise invalid(str(path), str(error)[:200], "text in UTF-8", "correct its encoding") from None


class _TemplateReader:
    """Validates the file field by field; an error names the field."""

    def __init__(self, path: Path) -> None:
        self._path = path
        data = _read(path, MAX_BYTES)
        try:
            self._fields = json.loads(data.decode(), object_pairs_hook=self._check_duplicates)
        except UserError:  # a duplicate field
            raise
        except (ValueError, RecursionError) as error:
            raise invalid(str(path), str(error)[:200], "JSON in UTF-8", "see docs/serve.md") from None
        self._object("the template", self._fields, FIELDS)

    def template(self) -> ChatTemplate:
        fields = self._fields
        roles = self._object("roles", fields.get("roles"), ROLES)
        for role in REQUIRED_ROLES:
            if role not in roles:
                raise self._invalid(
                    "roles", ", ".join(roles) or "empty", f"with {' and '.join(REQUIRED_ROLES)}", f"add {role!r}"
                )
        wrappings = {role: self._wrapping(f"roles.{role}", value) for role, value in roles.items()}
        stop = self._stop(fields.get("stop", []))
        # The model has generated the stop string that ended its answer, so it is not read a second time.
        suffix = wrappings["assistant"].suffix
        n_read = max((len(one) for one in stop if suffix.startswith(one)), default=0)
        return ChatTemplate(
            beginning=self._text("beginning", fields.get("beginning", "")),
            roles=wrappings,
            answer=self._text("answer", fields.get("answer", wrappings["assistant"].prefix)),
            stop=stop,
            between=self._text("between", fields.get("between", suffix[n_read:])),
        )

    def _wrapping(self, field: str, value: Any) -> Wrapping:
        sides = self._object(field, value, ("prefix", "suffix"))
        prefix, suffix = (self._text(f"{field}.{side}", sides.get(side, "")) for side in ("prefix", "suffix"))
        return Wrapping(prefix=prefix, suffix=suffix)

    def _stop(self, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise self._invalid("stop", value, "a list of strings", "put brackets around it")
        if len(value) > MAX_STOPS // 2:  # the other half is for the caller's own stop strings
            raise self._invalid("stop", f"{len(value)} strings", f"at most {MAX_STOPS // 2}", "use fewer")
        for i, one in enumerate(value):
            if not 0 < len(self._text(f"stop[{i}]", one).encode()) <= MAX_STOP_BYTES:
                raise self._invalid(f"stop[{i}]", one[:80], f"1 to {MAX_STOP_BYTES} bytes long", "shorten or remove it")
        return tuple(dict.fromkeys(value))

    def _text(self, field: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self._invalid(field, value, "a string", "put it in quotes")
        if any(0xD800 <= ord(character) < 0xE000 for character in value):
            raise self._invalid(field, ascii(value)[:80], "valid Unicode text", "remove the unpaired surrogate")
        return value

    def _object(self, field: str, value: Any, known: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(value, dict):
            got = "missing" if value is None else value
            raise self._invalid(field, got, f"an object with {', '.join(known)}", "see docs/serve.md")
        for name in value:
            if name not in known:
                raise self._invalid(
                    f"a field of {field}", name[:80], f"one of {', '.join(known)}", "remove or rename it"
                )
        return value

    def _check_duplicates(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise self._invalid("a field", twice[:80], "given once", "remove one of the two")
        return fields

    def _invalid(self, field: str, got: Any, needs: str, fix: str) -> UserError:
        return invalid(f"{self._path}: {field}", got, needs, fix)
