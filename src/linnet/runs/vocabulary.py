"""The vocabulary of a run: its tokenizer, copied into the run folder, and the image shape if the run generates images."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from linnet.core.errors import UserError
from linnet.core.files import read_json
from linnet.core.special_tokens import N_BYTE_IDS
from linnet.data import TokenDataset
from linnet.tokenizers.base import BytesTokenizer, Tokenizer
from linnet.tokenizers.load import has_tokenizer, open_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    tokenizer: Tokenizer
    shape: tuple[int, int, int] | None
    """Height, width and channels of an image; None for text."""


def save_vocabulary(folder: Path, data: TokenDataset) -> None:
    """Save the data's tokenizer to the run folder if there is none yet; otherwise check that they match."""
    if not has_tokenizer(folder):
        data.tokenizer.save(folder)
    check_match(folder, data, open_tokenizer(str(folder)))


def check_match(folder: Path, data: TokenDataset, own: Tokenizer) -> None:
    """Check that the data was made with the tokenizer `own`: ids of another one would decode to different text."""
    if data.tokenizer.fingerprint != own.fingerprint:
        raise UserError(
            f"the data at {data.cfg.source!r} was made with another tokenizer ({_name(data.tokenizer)}) than the run in {folder} "
            f"({_name(own)}). Fix: prepare it with the run's own, `linnet data prepare SOURCE --tokenizer {folder} --out DIR`, "
            "or train another model on it: without --from, into another --out."
        )


def read_vocabulary(folder: Path, n_vocab: int) -> Vocabulary:
    """Read the vocabulary of a run. An import without a tokenizer uses bytes if its vocabulary size matches."""
    if not has_tokenizer(folder) and n_vocab != N_BYTE_IDS:
        raise UserError(
            f"{folder} has {n_vocab} ids and no tokenizer. Fix: put its tokenizer.model or tokenizer.json into that folder, or "
            "import it again with --tokenizer."
        )
    tokenizer = open_tokenizer(str(folder)) if has_tokenizer(folder) else BytesTokenizer()
    try:
        shape = read_json(folder / "data.json").get("shape")
    except (OSError, ValueError):
        shape = None
    return Vocabulary(tokenizer=tokenizer, shape=None if shape is None else (shape[0], shape[1], shape[2]))


def _name(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.kind}, {tokenizer.n_vocab} ids, {tokenizer.fingerprint[:12]}"
