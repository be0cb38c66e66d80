"""Tokenization of plain text with the parent's tokenizer when fine-tuning starts, stored in the new run's folder."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from linnet.config.schema import EMBEDDED_CORPUS, DataConfig, RunConfig
from linnet.data import index as indexes
from linnet.data.load import EMOJI
from linnet.data.prepare.chunks import SplitFractions
from linnet.data.prepare.pipeline import PrepareConfig, is_unfinished, prepare
from linnet.data.sources.catalog import BENCHMARKS
from linnet.data.sources.documents import open_documents
from linnet.data.sources.images import contains_images
from linnet.tokenizers.base import BYTES
from linnet.tokenizers.load import has_tokenizer, open_tokenizer
from linnet.train.parent import tokenizer_of

FOLDER = "tokens"


def with_encoded_text(cfg: RunConfig, out: Path, log: Callable[[str], None]) -> RunConfig:
    """Encode the run's source into `out`/tokens and return the config that reads it from there.

    Returns `cfg` unchanged unless the source is plain text and the parent has its own tokenizer. Text that is already encoded is
    reused; if the text has changed since, that is an error, because the run was trained on the earlier text.
    """
    data = cfg.data
    if not isinstance(data, DataConfig) or data.validation_files or data.test_files or not _is_text(data.source):
        return cfg
    tokenizer = open_tokenizer(str(out)) if has_tokenizer(out) else tokenizer_of(cfg)
    if tokenizer is None or tokenizer.kind == BYTES:
        return cfg
    task = PrepareConfig(
        source=open_documents(data.source),
        tokenizer=tokenizer,
        fractions=SplitFractions(validation=data.validation_fraction, test=data.test_fraction),
        size=None,
        max_broken=0.0,
    )
    folder = out / FOLDER
    if not indexes.is_prepared(folder):
        log(
            f"Encoding {data.source} with the model's tokenizer ({tokenizer.kind}, {tokenizer.n_vocab} ids) into {folder}."
        )
    prepare(task, folder)
    # The encoded text carries its own splits, so the settings that made them are reset to their defaults.
    plain = DataConfig()
    fractions = {"validation_fraction": plain.validation_fraction, "test_fraction": plain.test_fraction}
    return dataclasses.replace(cfg, data=dataclasses.replace(data, source=str(folder), base=None, **fractions))


def _is_text(source: str) -> bool:
    if source in (EMBEDDED_CORPUS, *EMOJI) or source in BENCHMARKS:
        return False
    path = Path(os.path.expanduser(source))
    return not indexes.is_prepared(path) and not is_unfinished(path) and not contains_images(source)
