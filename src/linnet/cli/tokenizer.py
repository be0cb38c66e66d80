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

  train  train a sentencepiece tokenizer on text
  show   show the tokens of a text"""


@dataclasses.dataclass(frozen=True)
class TrainFlags:
    sources: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Training text: files, folders, globs, archives, JSON lines or parquet, as for `linnet data prepare`."""
    out: Path
    """Output folder (for tokenizer.model), or a file name that ends in .model."""
    vocab_size: int = 8192
    """Vocabulary size, including 3 special ids and 256 bytes."""
    model: Literal["bpe", "unigram"] = "bpe"
    """Sentencepiece model type."""
    column: str | None = None
    """JSON lines and parquet: field with the text. Default: `text`."""
    sample_bytes: int = 50_000_000
    """Maximum number of bytes to train on, sampled evenly from the text."""
    max_unpacked_gb: float | None = None
    """Reject a source whose compressed files unpack to more gigabytes than this. Default: 100 times their packed size, at
    least 0.27."""


@dataclasses.dataclass(frozen=True)
class ShowFlags:
    text: Annotated[FreeText, tyro.conf.Positional]
    """Text to encode."""
    tokenizer: str = "bytes"
    """`bytes`, a sentencepiece .model, a Hugging Face tokenizer.json, or a folder with one (prepared data, a run)."""
    end_token: str | None = None
    """Name of the EOS token, if the tokenizer does not define one. Default: that of the tokenizer."""
    rules: Literal["exact", "released"] | None = None
    """`exact`: every byte round-trips; `released`: encode and decode exactly as the file's own library does, as imported
    models do. Default: the setting of a run's folder; exact for a file."""
    json: bool = False
    """Print one JSON object instead of text."""


def tokenizer_command(argv: list[str]) -> int:
    name, rest = (argv[0], argv[1:]) if argv else ("", [])
    if name == "train":
        return _train(parse(TrainFlags, rest, "tokenizer train", "Train a sentencepiece tokenizer on text."))
    if name == "show":
        return _show(
            parse(ShowFlags, rest, "tokenizer show", "Show the tokens and ids of a text, and whether it round-trips.")
        )
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
        raise invalid("SOURCE", "", "at least one text file, folder or glob", "name the text to train on")
    path = flags.out if flags.out.suffix == ".model" else flags.out / SENTENCEPIECE_FILE
    if path.exists():
        raise invalid("--out", str(flags.out), f"a folder without a tokenizer ({path} exists)", "choose another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise invalid(
            "--out", str(flags.out), f"a folder that can be created ({error.strerror})", "choose another"
        ) from None
    content = train_sentencepiece(
        flags.sources,
        vocab_size=flags.vocab_size,
        model=flags.model,
        sample_bytes=flags.sample_bytes,
        column=flags.column,
        max_unpacked_gb=flags.max_unpacked_gb,
        log=_log,
    )
    atomic_write(path, content)
    trained = open_sentencepiece(content)
    _log(f"{path}: {trained.n_vocab:,} ids, fingerprint {trained.fingerprint[:12]}. Look at it with:")
    _log(f"  linnet tokenizer show 'some text' --tokenizer {path}")
    return 0


def _show(flags: ShowFlags) -> int:
    from linnet.tokenizers.load import open_tokenizer

    tokenizer = open_tokenizer(flags.tokenizer, end_token=flags.end_token, rules=flags.rules)
    data = flags.text.encode(errors="surrogateescape")  # the shell's bytes, UTF-8 or not
    ids = tokenizer.encode(data).tolist()
    pieces = tokenizer.pieces(ids)
    end = tokenizer.pieces([tokenizer.eos_id])[0]
    is_exact = tokenizer.decode(ids) == data
    if flags.json:
        description = {
            "tokenizer": tokenizer.kind,
            "n_vocab": tokenizer.n_vocab,
            "fingerprint": tokenizer.fingerprint,
            "exact": tokenizer.exact,
            "rules": tokenizer.rules,
            "end": {"id": tokenizer.eos_id, "piece": end},
            "bytes": len(data),
            "comes_back": is_exact,
            "ids": ids,
            "pieces": pieces,
        }
        print(json.dumps(description, ensure_ascii=False))
        return 0
    for token, piece in zip(ids, pieces, strict=True):
        print(f"{token:>7}  {_quoted(piece)}")
    why = "it follows the rules of its release" if tokenizer.rules == "released" else "it has no piece for every byte"
    result = "comes back exactly" if is_exact else f"does NOT come back: this tokenizer is not byte-exact, {why}"
    print(
        f"{len(data)} bytes, {len(ids)} ids, {result}. {tokenizer.kind}: {tokenizer.n_vocab:,} ids, end {tokenizer.eos_id} {end}"
    )
    return 0


def _log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _quoted(piece: str) -> str:
    """Quote a piece, so that spaces are visible."""
    return f"'{piece}'"
