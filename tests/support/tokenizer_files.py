"""One small tokenizer of each kind, made on the spot: what the tests of tokenizers read."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

from linnet.data.prepare.train_tokenizer import train_sentencepiece

PROSE = "the cat sat on mat and saw river under bridge while rain fell over quiet town where nobody had slept"
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
EXACT = ["bytes", "bpe", "unigram", "prefix", "gpt2", "llama", "metaspace"]
INEXACT = ["no_fallback", "wordpiece"]
ODD = [
    b"",
    b" ",
    b"\n",
    b"  two  spaces  \n\n\tand tabs\r\n ",
    b"\0\0a\0",
    b"\xff\xfe\x80 the cat \xc3",
    b"\xed\xa0\x80\xed\xb0\x80",  # surrogates, which are no UTF-8
    "the cat ﬁnds ½ Å Å e\u0301 ▁ ▁the ▅ \u3000 ①".encode(),  # what NFKC changes, and sentencepiece's own signs
    b"</s><s><|endoftext|><pad><unk>[SEP][UNK] </s> <0x41><0x0A>",
    "\ufeffthe 🐈 \U0010ffff \ufffd\ufffe".encode(),
    b"the cat sat\n" * 700 + b"\xe9t\xe9 \xf0\x9f the cat\n" + b"on the mat\n" * 6000,
    b"x" * 70_000,
]


def corpus() -> str:
    draw = random.Random(0)
    return "\n".join(" ".join(draw.choices(PROSE.split(), k=8)) for _ in range(400))


def sentencepiece(**options: Any) -> bytes:
    from sentencepiece import SentencePieceTrainer

    written = io.BytesIO()
    SentencePieceTrainer.Train(
        sentence_iterator=iter(corpus().split("\n")), model_writer=written, minloglevel=2, vocab_size=340, **options
    )
    return written.getvalue()


def gpt2() -> bytes:
    """Byte-level, with a prefix space, a normaliser that loses things, truncation and padding: all that must not matter."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([corpus()], trainer)
    made.add_tokens(["    "])
    made.enable_truncation(8)
    made.enable_padding(length=64)
    return made.to_str().encode()


def llama() -> bytes:
    """Byte fallback, and a normaliser that puts a space before the text."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = ["▁the", "▁cat", "▁sat", "▁on"]
    steps = [(word[: i + 1], word[i + 1]) for word in words for i in range(len(word) - 1)]
    letters = sorted({letter for word in words for letter in word})
    vocab = ["<unk>", "<s>", "</s>", *BYTE_PIECES, *letters, *dict.fromkeys(a + b for a, b in steps)]
    merges = list(dict.fromkeys(steps))
    made = Tokenizer(
        models.BPE({t: i for i, t in enumerate(vocab)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made.to_str().encode()


def metaspace() -> bytes:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = [
        ("<eos>", 0.0),
        ("<unk>", 0.0),
        *((t, -9.0) for t in BYTE_PIECES),
        ("▁", -3.0),
        ("▁the", -1.0),
        ("cat", -2.0),
    ]
    made = Tokenizer(models.Unigram([*vocab, *((c, -5.0) for c in "abcdehist0<>x")], unk_id=1, byte_fallback=True))
    made.add_special_tokens(["<eos>", "<unk>"])
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    return made.to_str().encode()


def wordpiece() -> bytes:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = ["[PAD]", "[UNK]", "[SEP]", "the", "cat", "##s", "</s>"]
    made = Tokenizer(models.WordPiece({t: i for i, t in enumerate(vocab)}, unk_token="[UNK]"))
    made.add_special_tokens(["[PAD]", "[UNK]", "[SEP]"])
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.WordPiece()
    made.enable_truncation(4)
    made.enable_padding(length=4)
    return made.to_str().encode()


def write_all(folder: Path) -> dict[str, str]:
    """A file of each kind, by name."""
    text = folder / "text.txt"
    text.write_text(corpus())
    content = {
        "bpe.model": train_sentencepiece([str(text)], vocab_size=340, model="bpe", sample_bytes=10**6),
        "unigram.model": train_sentencepiece([str(text)], vocab_size=300, model="unigram", sample_bytes=10**6),
        "prefix.model": sentencepiece(model_type="bpe", byte_fallback=True),
        "no_fallback.model": sentencepiece(model_type="unigram", hard_vocab_limit=False),
        "gpt2.json": gpt2(),
        "llama.json": llama(),
        "metaspace.json": metaspace(),
        "wordpiece.json": wordpiece(),
    }
    for name, data in content.items():
        (folder / name).write_bytes(data)
    return {"bytes": "bytes", "text": str(text), **{Path(n).stem: str(folder / n) for n in content}}
