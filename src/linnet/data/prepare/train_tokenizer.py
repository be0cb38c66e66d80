"""Train a sentencepiece model on any text source.

Ids: 0 PAD, 1 EOS, 2 unknown, then one piece per byte, then the learned pieces. The same text gives the same model on every machine.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from linnet.core.errors import UserError, invalid
from linnet.core.special_tokens import EOS, N_BYTE_IDS, PAD, UNKNOWN
from linnet.data.sources.documents import open_documents

BLOCK_BYTES = 64 * 1024
# No piece may contain these (tab, NUL, the trainer's own sign for unknown, bytes that are not UTF-8): the trainer would skip a
# line that has one.
_NEVER_IN_A_PIECE = re.compile("[\t\0\u2585\udc80-\udcff]")
# The trainer skips lines of more than 4,192 bytes, so longer ones are split, at a space if there is one.
_SHORT_LINE = re.compile(r".{1,1000}(?= |$)|.{1,1000}", re.DOTALL)
_TOO_SMALL = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")
_TOO_LARGE = re.compile(r"value <= (\d+)")


def train_sentencepiece(
    sources: Sequence[str],
    *,
    vocab_size: int,
    model: Literal["bpe", "unigram"],
    sample_bytes: int,
    column: str | None = None,
    max_unpacked_gb: float | None = None,
    log: Callable[[str], None] = lambda message: None,
) -> bytes:
    """Return the content of a model file. Predefined validation and test splits of a source are excluded."""
    if vocab_size <= N_BYTE_IDS:
        needs = f"more than {N_BYTE_IDS} (3 special ids and a piece for every byte come first)"
        raise invalid("--vocab-size", vocab_size, needs, "use 8192")
    if sample_bytes < 1:
        raise invalid("--sample-bytes", sample_bytes, "at least 1", "use 50000000")
    opened = [open_documents(source, column=column, max_unpacked_gb=max_unpacked_gb) for source in sources]
    parts = (part.data for documents in opened for part in documents.parts() if part.split in (None, "train"))
    sample = sample_evenly(split_blocks(parts, min(BLOCK_BYTES, sample_bytes)), sample_bytes)
    # A list, not an iterator: the trainer would replace our exceptions with its own.
    texts = [text for span in sample for text in trainer_lines(span)]
    for name, n in sorted(sum((documents.left_out for documents in opened), Counter[str]()).items()):
        log(f"left out: {n:,} {name.replace('_', ' ')}")
    if not texts:
        raise invalid("SOURCE", ", ".join(sources), "text with letters in it", "name text to learn from")
    log(f"learning from {sum(map(len, sample)):,} bytes of text")
    return _train(texts, vocab_size, model)


def split_blocks(parts: Iterable[bytes], max_bytes: int) -> Iterator[bytes]:
    """Yield complete lines in blocks of at most `max_bytes` bytes; a longer line is split."""
    for data in parts:
        begin = 0
        while begin < len(data):
            end = begin + max_bytes
            if end < len(data):
                end = data.rfind(b"\n", begin, end) + 1 or end
            yield data[begin:end]
            begin = end


def sample_evenly(items: Iterable[bytes], max_bytes: int) -> list[bytes]:
    """Return a sample of at most `max_bytes` bytes, spread evenly over a stream of any length.

    Keeps every item if they fit, else every second one, every fourth, and so on; memory is bounded by `max_bytes`.
    """
    kept: list[bytes] = []
    size, every = 0, 1
    for i, item in enumerate(items):
        if i % every:
            continue
        assert len(item) <= max_bytes
        kept.append(item)
        size += len(item)
        while size > max_bytes:
            kept, every = kept[::2], 2 * every
            size = sum(map(len, kept))
    return kept


def trainer_lines(text: bytes) -> Iterator[str]:
    """Yield the lines of a text in the form that the trainer accepts."""
    for line in text.decode(errors="surrogateescape").splitlines():
        for span in _NEVER_IN_A_PIECE.split(line):
            yield from _SHORT_LINE.findall(span)


def _train(texts: Sequence[str], vocab_size: int, model: Literal["bpe", "unigram"]) -> bytes:
    from sentencepiece import SentencePieceTrainer

    file = io.BytesIO()
    try:
        SentencePieceTrainer.Train(
            sentence_iterator=iter(texts),
            model_writer=file,
            vocab_size=vocab_size,
            model_type=model,
            pad_id=PAD,
            eos_id=EOS,
            unk_id=UNKNOWN,
            bos_id=-1,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            num_threads=16,  # affects the result for unigram, so it must not depend on the number of cores
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _to_user_error(str(error), vocab_size) from None
    return file.getvalue()


def _to_user_error(message: str, vocab_size: int) -> UserError:
    """Convert an error of the trainer; its message contains the possible vocabulary size."""
    if found := _TOO_SMALL.search(message):
        needs = f"at least {found[1]} for the characters of this text"
        return invalid("--vocab-size", vocab_size, needs, f"use {found[1]} or more")
    if found := _TOO_LARGE.search(message):
        needs = f"at most {found[1]} for this text"
        return invalid("--vocab-size", vocab_size, needs, f"use {found[1]}, or give more text")
    return UserError(f"the sentencepiece trainer failed ({message}). Fix: give it other text or another --vocab-size.")
