"""Sentencepiece models: the bytes of each piece, and encoding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from linnet.core.errors import invalid
from linnet.core.special_tokens import EOS, ONE_PER_BYTE, PAD, UNKNOWN
from linnet.tokenizers.base import SENTENCEPIECE_FILE, EncodingRules, invalid_tokenizer
from linnet.tokenizers.pieces import PieceModel, PieceTokenizer, ReleasedCodec

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

SPACE = "\u2581"
"""Represents a space inside a piece."""
KIND = "sentencepiece"
MIN_LOG_LEVEL = 3
"""Log fatal errors only: the library also prints errors about damaged models to stderr when it raises them."""
CHANGED = "  a  B\ufb01\u2460\u212b  "
"""A text that every normalizer other than the identity changes."""


def open_sentencepiece(
    content: bytes, end_token: str | None = None, name: str = SENTENCEPIECE_FILE, rules: EncodingRules = "exact"
) -> PieceTokenizer:
    processor, names = _processor(content, name)
    n_vocab = len(names)
    eos_id = _eos_id(processor.eos_id(), names, end_token)
    bytes_of = {i: bytes.fromhex(names[i][3:5]) for i in range(n_vocab) if processor.IsByte(i)}
    silent = {eos_id, *(i for i in range(n_vocab) if processor.IsControl(i) or processor.IsUnknown(i))}
    table = [b"" if i in silent else bytes_of.get(i) or names[i].replace(SPACE, " ").encode() for i in range(n_vocab)]
    byte_ids = {piece[0]: i for i, piece in bytes_of.items() if i not in silent}
    complete = len(byte_ids) == 256
    released = None
    if rules == "released" and not (complete and _is_own(processor)):
        released = _released(processor, _processor(content, name)[0], names, table, bytes_of)
    elif complete:  # a lossy model keeps its own normalization
        processor.OverrideNormalizerSpec(add_dummy_prefix=False, remove_extra_whitespaces=False)

    def encode_texts(texts: list[str]) -> list[list[int]]:
        return [processor.EncodeAsIds(text) for text in texts]  # encoding a list would start threads

    return PieceTokenizer(
        PieceModel(
            kind=KIND,
            file=SENTENCEPIECE_FILE,
            content=content,
            names=names,
            table=table,
            eos_id=eos_id,
            byte_ids=[byte_ids[byte] for byte in range(256)] if complete else None,
            unknown_id=processor.unk_id() if processor.unk_id() >= 0 else None,
            encode_texts=encode_texts,
            reopen=open_sentencepiece,
            released=released,
        )
    )


def _processor(content: bytes, name: str) -> tuple[SentencePieceProcessor, list[str]]:
    """Return the processor and the names of its pieces."""
    import sentencepiece
    from sentencepiece import SentencePieceProcessor

    sentencepiece.set_min_log_level(MIN_LOG_LEVEL)
    processor = SentencePieceProcessor()
    names: list[str] = []
    # ValueError: a message or a piece that is not UTF-8
    with contextlib.suppress(RuntimeError, ValueError, LookupError):
        processor.LoadFromSerializedProto(content)
        names = [processor.IdToPiece(i) for i in range(processor.GetPieceSize())]
    if not names:
        raise invalid_tokenizer(name, "a sentencepiece model (this file is not one, or is truncated)")
    return processor, names


def _is_own(processor: SentencePieceProcessor) -> bool:
    """Return whether the model was made by `linnet tokenizer train`. Its normalizer is the identity, so that both rules give the same
    ids, and `exact` also round-trips invalid UTF-8."""
    special = (processor.pad_id(), processor.eos_id(), processor.unk_id(), processor.bos_id())
    return special == (PAD, EOS, UNKNOWN, -1) and processor.Normalize(CHANGED) == CHANGED.replace(" ", SPACE)


def _released(
    processor: SentencePieceProcessor,
    continuing: SentencePieceProcessor,
    names: Sequence[str],
    table: list[bytes],
    bytes_of: Mapping[int, bytes],
) -> ReleasedCodec:
    """Return sentencepiece's own encoding and decoding. Sets the bytes of unknown ids in `table` to what it decodes them to."""
    continuing.OverrideNormalizerSpec(add_dummy_prefix=False)
    opening = list(table)
    for i, name in enumerate(names):
        if processor.IsUnknown(i):
            table[i] = opening[i] = processor.DecodeIds([i]).encode()
        elif i not in bytes_of and table[i] and name.startswith(SPACE):
            opening[i] = table[i][1:]
    return ReleasedCodec(
        encode=_encoder(processor),
        encode_continuing=_encoder(continuing),
        opening=opening if _drops_space(processor, names, opening) else None,
        drops_all=_drops_all(processor, names),
        errors=ONE_PER_BYTE,
    )


def _encoder(processor: SentencePieceProcessor) -> Callable[[str], list[int]]:
    return lambda text: processor.EncodeAsIds(text)


def _drops_space(processor: SentencePieceProcessor, names: Sequence[str], opening: Sequence[bytes]) -> bool:
    """Return whether the decoder drops a leading space. (The file's settings cannot be read without protobuf.)"""
    i = next((i for i, name in enumerate(names) if name.startswith(SPACE)), None)
    return i is not None and processor.DecodeIds([i]).encode() == opening[i]


def _drops_all(processor: SentencePieceProcessor, names: Sequence[str]) -> bool:
    """Return whether the decoder drops all leading spaces, tested with two pieces that are a single space each."""
    if SPACE not in names:
        return False
    return not processor.DecodeIds([names.index(SPACE)] * 2)


def _eos_id(own: int, names: Sequence[str], end_token: str | None) -> int:
    if end_token is not None:
        if end_token not in names:
            raise invalid(
                "--end-token", end_token, "a piece of the tokenizer", "see its pieces with `linnet tokenizer show`"
            )
        return names.index(end_token)
    if own < 0:
        raise invalid("--end-token", None, "given for this tokenizer (it has no end token)", "name one of its pieces")
    return own
