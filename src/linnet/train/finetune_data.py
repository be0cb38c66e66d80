"""Text for a model that has a tokenizer of its own: encoded with it when fine-tuning starts, into the new run's folder."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from linnet.config.schema import EMBEDDED_CORPUS, DataConfig, RunConfig
from linnet.data import index as indexes
from linnet.data.load import EMOJI
from linnet.data.prepare.chunks import Shares
from linnet.data.prepare.pipeline import Task, is_unfinished, prepare
from linnet.data.sources.catalog import NAMED
from linnet.data.sources.documents import open_documents
from linnet.data.sources.images import looks_like_pictures
from linnet.tokenizers.base import BYTES
from linnet.tokenizers.load import has_tokenizer, open_tokenizer
from linnet.train.parent import tokenizer_of

FOLDER = "tokens"


def with_encoded_text(cfg: RunConfig, out: Path, say: Callable[[str], None]) -> RunConfig:
    """The same run on `out`/tokens, if its source is plain text and the parent has a tokenizer of its own. Text that was encoded
    before is not encoded again; other text is refused, since it would not be what the run was trained on."""
    data = cfg.data
    if not isinstance(data, DataConfig) or data.validation_files or data.test_files or not _is_text(data.source):
        return cfg
    tokenizer = open_tokenizer(str(out)) if has_tokenizer(out) else tokenizer_of(cfg)
    if tokenizer is None or tokenizer.kind == BYTES:
        return cfg
    task = Task(
        source=open_documents(data.source),
        tokenizer=tokenizer,
        shares=Shares(validation=data.validation_fraction, test=data.test_fraction),
        size=None,
        max_broken=0.0,
    )
    folder = out / FOLDER
    if not indexes.is_prepared(folder):
        say(
            f"Encoding {data.source} with the model's tokenizer ({tokenizer.kind}, {tokenizer.n_vocab} ids) into {folder}."
        )
    prepare(task, folder)
    # The encoded text has splits of its own, so the settings that made them return to their defaults.
    plain = DataConfig()
    fractions = {"validation_fraction": plain.validation_fraction, "test_fraction": plain.test_fraction}
    return dataclasses.replace(cfg, data=dataclasses.replace(data, source=str(folder), base=None, **fractions))


def _is_text(source: str) -> bool:
    if source in (EMBEDDED_CORPUS, *EMOJI) or source in NAMED:
        return False
    path = Path(os.path.expanduser(source))
    return not indexes.is_prepared(path) and not is_unfinished(path) and not looks_like_pictures(source)
