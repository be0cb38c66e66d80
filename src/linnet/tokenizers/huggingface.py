"""Hugging Face tokenizer.json files, read with the `tokenizers` package: byte-level (GPT-2 style), with byte fallback (Llama
style), and others, which do not round-trip every byte and have `exact` false."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from linnet.core.errors import UserError, invalid
from linnet.core.files import parse_json
from linnet.core.special_tokens import ONE_PER_BYTE
from linnet.tokenizers.base import HUGGINGFACE_FILE, EncodingRules, SpecialToken, invalid_tokenizer
from linnet.tokenizers.pieces import PieceModel, PieceTokenizer, ReleasedCodec

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KIND = "huggingface"
EOS_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<EOS>",
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
    "[SEP]",
)
"""Known EOS tokens in order of precedence: the first that is a special token of the file is used."""
UNKNOWN_TOKENS = ("<unk>", "[UNK]", "<|unk|>")
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def open_huggingface(
    content: bytes, end_token: str | None = None, name: str = HUGGINGFACE_FILE, rules: EncodingRules = "exact"
) -> PieceTokenizer:
    # Encoding is parallelized by worker processes; the package's own threads would compete with them and warn when forked.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    spec = _spec(content, name)
    plain = _tokenizer(spec, name)
    names = _names(plain)
    added = plain.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special}
    eos_id = _eos_id({names[i]: i for i in sorted(special)}, names, end_token)
    silent = special | {eos_id} | {i for i, token in enumerate(names) if token is None}
    literal = {i: token.content.encode() for i, token in added.items()}
    bytes_of = _bytes_of(spec, plain, [token for token in names if token is not None])
    table = [b"" if i in silent else literal.get(i) or bytes_of(str(token)) for i, token in enumerate(names)]
    byte_ids = _byte_ids(spec, names, silent)
    # A tokenizer that is lossy anyway keeps its own prefix handling.
    used = plain if byte_ids is None else _tokenizer(_without_prefix(spec), name)
    return PieceTokenizer(
        PieceModel(
            kind=KIND,
            file=HUGGINGFACE_FILE,
            content=content,
            names=[f"<id {i}>" if token is None else token for i, token in enumerate(names)],
            table=table,
            eos_id=eos_id,
            byte_ids=byte_ids,
            unknown_id=next((i for i, token in enumerate(names) if token in UNKNOWN_TOKENS), None),
            encode_texts=_encoder(used),
            reopen=open_huggingface,
            released=_released(spec, name, plain, table) if rules == "released" else None,
            special={i: SpecialToken(i, token.lstrip, token.rstrip) for i, token in added.items()},
        )
    )


def _released(spec: Mapping[str, Any], name: str, plain: Tokenizer, table: Sequence[bytes]) -> ReleasedCodec:
    """Return the package's own encoding and decoding, except that text is never encoded to a control id."""
    whole, continuing = _encoder(plain), _encoder(_tokenizer(_without_prefix(spec), name))
    word = next((i for i, piece in enumerate(table) if piece.startswith(b" ") and len(piece) > 1), None)
    drops = word is not None and plain.decode([word], skip_special_tokens=False).encode() == table[word][1:]
    byte_pieces = {i for token, i in plain.get_vocab().items() if _BYTE_PIECE.fullmatch(token)}
    opening = [piece if i in byte_pieces else piece.removeprefix(b" ") for i, piece in enumerate(table)]
    return ReleasedCodec(
        encode=lambda text: whole([text])[0],
        encode_continuing=lambda text: continuing([text])[0],
        opening=opening if drops else None,
        drops_all=False,
        errors=ONE_PER_BYTE if "ByteFallback" in _types(spec.get("decoder")) else "replace",
    )


def byte_letters() -> dict[str, int]:
    """Return the GPT-2 byte alphabet: the character that represents each byte, itself if printable, else one from U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = sorted(set(range(256)) - set(seen))
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(unseen)}


def _spec(content: bytes, name: str) -> dict[str, Any]:
    try:
        spec = parse_json(content)
    except ValueError as error:
        raise invalid_tokenizer(name, f"a tokenizer.json (it is not JSON: {error})") from None
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        keys = ", ".join(str(key) for key in list(spec)[:6]) if isinstance(spec, dict) else type(spec).__name__
        raise invalid_tokenizer(name, f"a tokenizer.json with a 'model' (this one has {keys or 'nothing'})")
    return spec


def _tokenizer(spec: Mapping[str, Any], name: str) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the package raises no narrower kind
        raise invalid_tokenizer(name, f"a tokenizer.json that the package `tokenizers` can read ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # special tokens spelled out in a text are encoded as text
    return tokenizer


def _encoder(tokenizer: Tokenizer) -> Callable[[list[str]], list[list[int]]]:
    def encode_texts(texts: list[str]) -> list[list[int]]:
        try:
            return [found.ids for found in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        except Exception as error:  # the package raises no narrower kind
            raise UserError(
                f"the tokenizer cannot encode a text ({error}). Fix: its tokenizer.json is corrupt; download or create it again."
            ) from None

    return encode_texts


def _names(tokenizer: Tokenizer) -> list[str | None]:
    """Return the token names by id, with None for unused ids."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    names: list[str | None] = [None] * (max(vocab.values(), default=-1) + 1)
    for token, i in vocab.items():
        names[i] = token
    return names


def _eos_id(special: Mapping[str | None, int], names: Sequence[str | None], end_token: str | None) -> int:
    if end_token is not None:
        if end_token not in names:
            raise invalid("--end-token", end_token, "a token of the tokenizer", f"use one of: {_some(special)}")
        return names.index(end_token)
    known = next((special[token] for token in EOS_TOKENS if token in special), None)
    if known is None:
        needs = "given for this tokenizer (none of its special tokens is known to end a document)"
        raise invalid(
            "--end-token", None, needs, f"name the token that ends a document; special ones: {_some(special)}"
        )
    return known


def _some(special: Mapping[str | None, int]) -> str:
    return ", ".join(str(token) for token in list(special)[:8]) or "none"


def _parts(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield a pipeline step, or the steps of a (nested) sequence."""
    if step is None:
        return
    inner = next((step[key] for key in ("normalizers", "pretokenizers", "decoders") if key in step), None)
    if inner is None:
        yield step
    else:
        for part in inner:
            yield from _parts(part)


def _types(step: Mapping[str, Any] | None) -> set[str | None]:
    return {part.get("type") for part in _parts(step)}


def _bytes_of(spec: Mapping[str, Any], tokenizer: Tokenizer, names: Sequence[str]) -> Callable[[str], bytes]:
    """Return a function from a token to its bytes inside a text, by the kind of decoder."""
    types = _types(spec.get("decoder"))
    if "ByteLevel" in types:
        letters = byte_letters()
        return lambda token: (
            bytes(letters[letter] for letter in token) if all(map(letters.__contains__, token)) else token.encode()
        )
    if "Metaspace" in types or "ByteFallback" in types:
        fallback = "ByteFallback" in types

        def metaspace(token: str) -> bytes:
            byte = _BYTE_PIECE.fullmatch(token) if fallback else None
            return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()

        return metaspace
    # For any other decoder, decode the token after a word and take the difference.
    word = next((token for token in sorted(names, key=len) if token.isalnum()), names[0])
    decoder = tokenizer.decoder

    def encode_token(token: str) -> bytes:
        if decoder is None:
            return f" {token}".encode()
        return decoder.decode([word, token]).removeprefix(decoder.decode([word])).encode()

    return encode_token


def _byte_ids(spec: Mapping[str, Any], names: Sequence[str | None], silent: set[int]) -> list[int] | None:
    """Return the id of each byte, or None if the vocabulary does not have all of them."""
    types = _types(spec.get("decoder"))
    by_name = {token: i for i, token in enumerate(names) if token is not None and i not in silent}
    if "ByteLevel" in types:
        wanted = sorted(byte_letters(), key=byte_letters().__getitem__)
    elif "ByteFallback" in types:
        wanted = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return None
    return [by_name[token] for token in wanted] if all(token in by_name for token in wanted) else None


def _without_prefix(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec without an added space prefix, which would break the round trip and is wrong inside a document."""
    changed = json.loads(json.dumps(spec))
    normalizer = changed.get("normalizer")
    if normalizer is not None:
        kept = [part for part in _parts(normalizer) if part.get("type") != "Prepend"]
        changed["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
    splitter = changed.get("pre_tokenizer")
    if "WhitespaceSplit" not in _types(splitter):  # with it, the prefix is all that remains of the spaces
        for part in _parts(splitter):
            assert isinstance(part, dict)
            had = part.pop("add_prefix_space", None)
            if part.get("type") == "Metaspace":
                part["prepend_scheme"] = "never"
            elif had is not None:
                part["add_prefix_space"] = False
    return changed
