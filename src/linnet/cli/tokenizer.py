"""`linnet tokenizer train` and `linnet tokenizer show`."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from linnet.cli.parse import parse
from linnet.core.errors import UserError, did_you_mean, invalid
from linnet.core.local_path import FreeText

SUBCOMMANDS = """usage: linnet tokenizer train SOURCE... --out DIR|FILE.model [--help]
       linnet tokenizer show TEXT [--tokenizer X] [--help]

  train  learn a sentencepiece model from text
  show   print the pieces and ids of a text"""


@dataclasses.dataclass(frozen=True)
class TrainFlags:
    sources: Annotated[tuple[str, ...], tyro.conf.Positional]
    """What to learn from: text, folders, globs, archives, JSON lines, parquet, as for `linnet data prepare`."""
    out: Path
    """A folder (the model is tokenizer.model in it), or a file that ends in .model."""
    vocab_size: int = 8192
    """Ids in all: 3 special ones, 256 bytes, and the pieces."""
    model: Literal["bpe", "unigram"] = "bpe"
    """How the pieces are chosen."""
    column: str | None = None
    """Where the text is in JSON lines and parquet; `text` if not given."""
    sample_bytes: int = 50_000_000
    """Learn from so much at most, spread evenly over the text."""
    max_unpacked_gb: float | None = None
    """Refuse a source whose packed files unpack to more gigabytes than this. If not given: 100 times their packed size, and at
    least 0.27."""


@dataclasses.dataclass(frozen=True)
class ShowFlags:
    text: Annotated[FreeText, tyro.conf.Positional]
    """What to encode."""
    tokenizer: str = "bytes"
    """`bytes`, a sentencepiece .model, a Hugging Face tokenizer.json, or a folder with one (prepared data, a run)."""
    end_token: str | None = None
    """The token that ends a document, where the tokenizer does not say."""
    rules: Literal["exact", "released"] | None = None
    """`exact`: every byte comes back; `released`: as the library of the file encodes and decodes, which imported models use. If not
    given: as a run's folder says, and exact for a file."""
    json: bool = False
    """One JSON object."""


def tokenizer_command(argv: list[str]) -> int:
    name, rest = (argv[0], argv[1:]) if argv else ("", [])
    if name == "train":
        return _train(parse(TrainFlags, rest, "tokenizer train", "Learns a sentencepiece model from text."))
    if name == "show":
        return _show(parse(ShowFlags, rest, "tokenizer show", "Prints the pieces and ids of a text."))
    if name in ("-h", "--help"):
        print(SUBCOMMANDS)
        return 0
    print(SUBCOMMANDS, file=sys.stderr)
    raise UserError(
        f"name what to do with a tokenizer, train or show (got {name!r}).{did_you_mean(name, ('train', 'show'))}"
    )


def _train(flags: TrainFlags) -> int:
    from linnet.core.files import atomic_write
    from linnet.data.prepare.train_tokenizer import train_sentencepiece
    from linnet.tokenizers.base import SENTENCEPIECE_FILE
    from linnet.tokenizers.sentencepiece import open_sentencepiece

    if not flags.sources:
        raise invalid("SOURCE", "", "at least one text file, folder or glob", "name the text to learn from")
    path = flags.out if flags.out.suffix == ".model" else flags.out / SENTENCEPIECE_FILE
    if path.exists():
        raise invalid("--out", str(flags.out), f"a place without a tokenizer ({path} is there)", "choose another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise invalid(
            "--out", str(flags.out), f"a folder that can be made ({error.strerror})", "choose another"
        ) from None
    content = train_sentencepiece(
        flags.sources,
        vocab_size=flags.vocab_size,
        model=flags.model,
        sample_bytes=flags.sample_bytes,
        column=flags.column,
        max_unpacked_gb=flags.max_unpacked_gb,
        say=_say,
    )
    atomic_write(path, content)
    trained = open_sentencepiece(content)
    _say(f"{path}: {trained.n_vocab:,} ids, fingerprint {trained.fingerprint[:12]}. Look at it with:")
    _say(f"  linnet tokenizer show 'some text' --tokenizer {path}")
    return 0


def _show(flags: ShowFlags) -> int:
    from linnet.tokenizers.load import open_tokenizer

    tokenizer = open_tokenizer(flags.tokenizer, end_token=flags.end_token, rules=flags.rules)
    data = flags.text.encode(errors="surrogateescape")  # the shell's bytes, UTF-8 or not
    ids = tokenizer.encode(data).tolist()
    pieces = tokenizer.pieces(ids)
    end = tokenizer.pieces([tokenizer.end_id])[0]
    same = tokenizer.decode(ids) == data
    if flags.json:
        about = {
            "tokenizer": tokenizer.kind,
            "n_vocab": tokenizer.n_vocab,
            "fingerprint": tokenizer.fingerprint,
            "exact": tokenizer.exact,
            "rules": tokenizer.rules,
            "end": {"id": tokenizer.end_id, "piece": end},
            "bytes": len(data),
            "comes_back": same,
            "ids": ids,
            "pieces": pieces,
        }
        print(json.dumps(about, ensure_ascii=False))
        return 0
    for token, piece in zip(ids, pieces, strict=True):
        print(f"{token:>7}  {_quoted(piece)}")
    why = "it is used as released" if tokenizer.rules == "released" else "it has no piece for every byte"
    words = "comes back exactly" if same else f"does NOT come back: this tokenizer is not byte-exact, {why}"
    print(
        f"{len(data)} bytes, {len(ids)} ids, {words}. {tokenizer.kind}: {tokenizer.n_vocab:,} ids, end {tokenizer.end_id} {end}"
    )
    return 0


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _quoted(piece: str) -> str:
    """Spaces can be seen between quotes."""
    return f"'{piece}'"
