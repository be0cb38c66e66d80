"""A run's chat template: how a conversation becomes one text, and which strings end the answer. It is data only, without code.

A run may provide its own as `chat_template.json`. All of it is plain text and is tokenized as such (no special tokens).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from linnet.core.errors import UserError, invalid
from linnet.serve.request import MAX_STOP_BYTES, MAX_STOPS

FILE = "chat_template.json"
MAX_BYTES = 1 << 16
ROLES = ("system", "developer", "user", "assistant")
NEEDED = ("user", "assistant")
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

    def text(self, messages: Iterable[tuple[str, str]], *, goes_on: bool) -> str:
        """Render (role, content) pairs as one text. `goes_on`: the text continues a session that is not empty."""
        parts = [self.between if goes_on else self.beginning]
        for role, content in messages:
            wrapping = self._wrapping(role)
            parts += [wrapping.prefix, content, wrapping.suffix]
        return "".join([*parts, self.answer])

    def _wrapping(self, role: str) -> Wrapping:
        known = self.roles.get(role) or (self.roles.get("system") if role == "developer" else None)
        if known is None:
            raise invalid(
                "the role of a message", role, f"one of {', '.join(self.roles)} with this model", "use another"
            )
        return known


PLAIN = ChatTemplate(
    beginning="",
    roles={role: Wrapping(prefix=f"{role}: ", suffix="\n") for role in ROLES},
    answer="assistant:",
    stop=(),
    between="\n",
)
"""One line per message, followed by the start of the answer's line."""


def read_template(folder: Path) -> ChatTemplate:
    """Read and validate a run's own template; return the plain one if it has none."""
    path = folder / FILE
    if not path.exists():
        return PLAIN
    return _Checked(path).template()


class _Checked:
    """Validates the file field by field; an error names the field."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            data = path.read_bytes()
        except OSError as error:
            raise invalid(str(path), error.strerror, "a file that can be read", "check its rights") from None
        if len(data) > MAX_BYTES:
            raise invalid(f"the size of {path}", len(data), f"at most {MAX_BYTES} bytes", "shorten it")
        try:
            self._fields = json.loads(data.decode(), object_pairs_hook=self._once)
        except UserError:  # a duplicate field
            raise
        except (ValueError, RecursionError) as error:
            raise invalid(str(path), str(error)[:200], "JSON in UTF-8", "see docs/serving.md") from None
        self._object("the template", self._fields, FIELDS)

    def template(self) -> ChatTemplate:
        fields = self._fields
        roles = self._object("roles", fields.get("roles"), ROLES)
        for role in NEEDED:
            if role not in roles:
                raise self._refuse(
                    "roles", ", ".join(roles) or "empty", f"with {' and '.join(NEEDED)}", f"add {role!r}"
                )
        wrappings = {role: self._wrapping(f"roles.{role}", value) for role, value in roles.items()}
        stop = self._stop(fields.get("stop", []))
        # The model has generated the stop string that ended its answer, so it is not read a second time.
        suffix = wrappings["assistant"].suffix
        read = max((len(one) for one in stop if suffix.startswith(one)), default=0)
        return ChatTemplate(
            beginning=self._text("beginning", fields.get("beginning", "")),
            roles=wrappings,
            answer=self._text("answer", fields.get("answer", wrappings["assistant"].prefix)),
            stop=stop,
            between=self._text("between", fields.get("between", suffix[read:])),
        )

    def _wrapping(self, field: str, value: Any) -> Wrapping:
        sides = self._object(field, value, ("prefix", "suffix"))
        prefix, suffix = (self._text(f"{field}.{side}", sides.get(side, "")) for side in ("prefix", "suffix"))
        return Wrapping(prefix=prefix, suffix=suffix)

    def _stop(self, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise self._refuse("stop", value, "a list of strings", "put brackets around it")
        if len(value) > MAX_STOPS // 2:  # the other half is for the caller's own stop strings
            raise self._refuse("stop", f"{len(value)} strings", f"at most {MAX_STOPS // 2}", "use fewer")
        for i, one in enumerate(value):
            if not 0 < len(self._text(f"stop[{i}]", one).encode()) <= MAX_STOP_BYTES:
                raise self._refuse(f"stop[{i}]", one[:80], f"1 to {MAX_STOP_BYTES} bytes long", "shorten or remove it")
        return tuple(dict.fromkeys(value))

    def _text(self, field: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self._refuse(field, value, "a string", "put it in quotes")
        if any(0xD800 <= ord(letter) < 0xE000 for letter in value):
            raise self._refuse(
                field, ascii(value)[:80], "text that is Unicode", "leave out the half of a surrogate pair"
            )
        return value

    def _object(self, field: str, value: Any, known: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(value, dict):
            got = "missing" if value is None else value
            raise self._refuse(field, got, f"an object with {', '.join(known)}", "see docs/serving.md")
        for name in value:
            if name not in known:
                raise self._refuse(
                    f"a field of {field}", name[:80], f"one of {', '.join(known)}", "remove or rename it"
                )
        return value

    def _once(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise self._refuse("a field", twice[:80], "given once", "remove one of the two")
        return fields

    def _refuse(self, field: str, got: Any, needs: str, fix: str) -> UserError:
        return invalid(f"{self._path}: {field}", got, needs, fix)
