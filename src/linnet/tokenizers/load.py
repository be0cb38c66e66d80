"""Open a tokenizer by name, from a file or from a folder."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import get_args

from linnet.config import codec
from linnet.core.errors import UserError, invalid
from linnet.core.local_path import check_local
from linnet.tokenizers.base import (
    BYTES,
    BYTES_FILE,
    EOS_FILE,
    SETTINGS_FILE,
    TOKENIZER_FILES,
    BytesTokenizer,
    EncodingRules,
    Tokenizer,
    invalid_tokenizer,
)


def open_tokenizer(name: str, *, end_token: str | None = None, rules: EncodingRules | None = None) -> Tokenizer:
    """Open `bytes`, a model file, or a folder with a saved tokenizer. `end_token` names the EOS token. `rules` defaults to those of
    the saved tokenizer, or `exact` for a file."""
    if name == BYTES:
        return _bytes(end_token)
    check_local("--tokenizer", name)
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        path = _in_folder(path)
        end_file = path.with_name(EOS_FILE)
        if end_token is None and end_file.is_file():
            end_token = _read(end_file).decode(errors="replace")
        rules = rules or _saved_rules(path.parent)
    if path.name == BYTES_FILE:
        return _bytes(end_token)
    content = _read(path)
    if content.lstrip()[:1] == b"{":
        from linnet.tokenizers.huggingface import open_huggingface

        return open_huggingface(content, end_token, str(path), rules or "exact")
    from linnet.tokenizers.sentencepiece import open_sentencepiece

    return open_sentencepiece(content, end_token, str(path), rules or "exact")


def _saved_rules(folder: Path) -> EncodingRules:
    """Return the rules in the folder's settings file. Without one, the rules are `released` if the model uses no BOS, as imported
    models such as Grok-1, and `exact` otherwise (a run from before the setting existed)."""
    file = folder / SETTINGS_FILE
    if not file.is_file():
        return "released" if _reads_bare_ids(folder) else "exact"
    try:
        found = json.loads(_read(file))["rules"]
    except (ValueError, KeyError, TypeError):
        found = None
    for rules in get_args(EncodingRules):
        if found == rules:
            return rules
    needs = f"one of {', '.join(get_args(EncodingRules))}"
    raise invalid(f"rules in {file}", found, needs, "restore the file, or import the model again")


def _reads_bare_ids(folder: Path) -> bool:
    if not (folder / "config.json").is_file():
        return False
    with contextlib.suppress(UserError):
        cfg = codec.load(folder / "config.json")
        return cfg.reads_tokens and cfg.lm.bos_id is None
    return False


def _bytes(end_token: str | None) -> BytesTokenizer:
    if end_token is not None:
        raise invalid(
            "--end-token", end_token, "left out with the tokenizer 'bytes' (its id 1 ends a document)", "omit it"
        )
    return BytesTokenizer()


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder has a saved tokenizer."""
    return bool(_saved(folder))


def _saved(folder: Path) -> list[Path]:
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


def _in_folder(folder: Path) -> Path:
    there = _saved(folder)
    if not there:
        raise invalid_tokenizer(str(folder), f"a folder that contains one of {', '.join(TOKENIZER_FILES)}")
    if len(there) > 1:
        names = " and ".join(path.name for path in there)
        raise invalid(
            "--tokenizer", str(folder), f"a folder with one tokenizer (it contains {names})", f"use {there[0]}"
        )
    return there[0]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise invalid_tokenizer(str(path)) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise invalid_tokenizer(str(path), f"a file that can be read ({reason})") from None
