"""Sentencepiece models: what each piece stands for, and how to ask for the pieces of a text."""

from __future__ import annotations

from collections.abc import Sequence

from linnet.data.tokenizer import SENTENCEPIECE_FILE, not_a_tokenizer
from linnet.data.tokenizer_pieces import Model, PieceTokenizer
from linnet.errors import refuse

SPACE = "\u2581"
"""Stands for a space inside a piece."""
KIND = "sentencepiece"
MIN_LOG_LEVEL = 3
"""Fatal only: the library prints errors about damaged models to stderr, besides raising them."""


def open_sentencepiece(content: bytes, end_token: str | None = None, name: str = SENTENCEPIECE_FILE) -> PieceTokenizer:
    import sentencepiece
    from sentencepiece import SentencePieceProcessor

    sentencepiece.set_min_log_level(MIN_LOG_LEVEL)
    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
        n_vocab = processor.GetPieceSize()
        names = [processor.IdToPiece(i) for i in range(n_vocab)]
    except (RuntimeError, ValueError, LookupError):  # ValueError: a message or a piece that is not UTF-8
        n_vocab, names = 0, []
    if not n_vocab:
        raise not_a_tokenizer(name, "a sentencepiece model (this file is none, or is cut short)")
    end_id = _end_id(processor.eos_id(), names, end_token)
    bytes_of = {i: bytes.fromhex(names[i][3:5]) for i in range(n_vocab) if processor.IsByte(i)}
    silent = {end_id, *(i for i in range(n_vocab) if processor.IsControl(i) or processor.IsUnknown(i))}
    table = [b"" if i in silent else bytes_of.get(i) or names[i].replace(SPACE, " ").encode() for i in range(n_vocab)]
    byte_ids = {piece[0]: i for i, piece in bytes_of.items() if i not in silent}
    exact = len(byte_ids) == 256
    if exact:  # else the model loses something anyway, and keeps its own ways
        processor.OverrideNormalizerSpec(add_dummy_prefix=False, remove_extra_whitespaces=False)

    def encode_texts(texts: list[str]) -> list[list[int]]:
        return [processor.EncodeAsIds(text) for text in texts]  # a list at once would start threads

    return PieceTokenizer(
        Model(
            kind=KIND,
            file=SENTENCEPIECE_FILE,
            content=content,
            names=names,
            table=table,
            end_id=end_id,
            byte_ids=[byte_ids[byte] for byte in range(256)] if exact else None,
            unknown_id=processor.unk_id() if processor.unk_id() >= 0 else None,
            encode_texts=encode_texts,
            reopen=open_sentencepiece,
        )
    )


def _end_id(own: int, names: Sequence[str], end_token: str | None) -> int:
    if end_token is not None:
        if end_token not in names:
            raise refuse(
                "--end-token", end_token, "a piece of the tokenizer", "see its pieces with `linnet tokenizer show`"
            )
        return names.index(end_token)
    if own < 0:
        raise refuse("--end-token", None, "given for this tokenizer (it has no end token)", "name one of its pieces")
    return own
