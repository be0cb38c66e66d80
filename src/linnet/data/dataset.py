"""`TokenDataset`: the splits of a run. A training batch is a pure function of the step; evaluation counts every token once."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float32

from linnet.config.schema import DataConfig
from linnet.core.errors import UserError, invalid
from linnet.data import shuffle
from linnet.data.batch import Batch, Split, make_batch
from linnet.data.conditioning import Condition
from linnet.data.sources.files import format_left_out
from linnet.data.splits import SPLITS, check_split, choose_evenly
from linnet.tokenizers.base import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenDataset:
    """Windows and their order, for any implementation of `Split`."""

    cfg: DataConfig
    seed: int
    tokenizer: Tokenizer
    shape: tuple[int, int, int] | None
    """Image shape (height, width, channels); None for text."""
    train: Split
    validation: Split
    test: Split
    origin: dict[str, Any]
    """Provenance of the splits, for `describe`."""
    condition: Condition | None = None
    """Image embeddings for a conditional model."""

    def batch(self, step: int, host: int = 0, n_hosts: int = 1) -> Batch:
        """Return the training batch of update `step`.

        Sequences are ordered by (seed, epoch), and each is read over `updates_per_sequence` updates; an epoch may end in mid-batch.
        Each host reads its own rows; the global batch is the same for any number of hosts.
        """
        assert step >= 0
        sequence, update = divmod(step, self.cfg.updates_per_sequence)
        length = self.cfg.update_len
        rows = shuffle.host_slice(self.cfg.batch_size, host, n_hosts)
        first = sequence * self.cfg.batch_size + rows.start
        windows = shuffle.window_indices(self.seed, first, len(rows), self.train.n_windows)
        return make_batch(self.train, windows, update * length, (update + 1) * length, len(rows), self.embeds("train"))

    def evaluation(self, split: str, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """Iterate over complete sequences [batch_size, sequence_len] in the order of the split.

        The last batch is filled up with masked rows, so every target counts once. `limit` is the number of sequences to read,
        spread evenly over the split.
        """
        chosen = self.split(split)
        if batch_size < 1:
            raise invalid("batch size of the evaluation", batch_size, "at least 1", f"use {self.cfg.batch_size}")
        windows = choose_evenly(chosen.n_windows, limit).tolist()
        if not windows:
            raise _empty(split, self.cfg)
        # The generator is lazy; the checks above run immediately.
        return (
            make_batch(chosen, windows[at : at + batch_size], 0, self.cfg.sequence_len, batch_size, self.embeds(split))
            for at in range(0, len(windows), batch_size)
        )

    def split(self, name: str) -> Split:
        check_split(name)
        return {"train": self.train, "validation": self.validation, "test": self.test}[name]

    def embeds(self, split: str) -> Float32[np.ndarray, "n E"] | None:
        """Return the image embeddings of a split, in its order."""
        return None if self.condition is None else self.condition.embeds[split]

    @property
    def n_vocab(self) -> int:
        return self.tokenizer.n_vocab

    @property
    def kind(self) -> str:
        return "text" if self.shape is None else "pixels"

    def raw(self, split: str) -> bytes:
        """Return the original content of a split, for comparison with other compressors."""
        chosen = self.split(split)
        content = chosen.content(0, chosen.n_tokens + 1)  # includes a first token that is not a target
        return content.tobytes() if content.dtype == np.uint8 else self.tokenizer.decode(content.tolist())

    def with_bos(self, bos_id: int | None) -> TokenDataset:
        """Return the same data for a model whose sequences begin with this BOS id, or with none."""
        splits = {name: self.split(name).with_bos(bos_id) for name in SPLITS}
        return dataclasses.replace(self, **splits)

    def unpredicted_bytes(self, split: str) -> int:
        """Return the number of bytes that are never predicted: the first token, if no BOS id precedes it."""
        chosen = self.split(split)
        if chosen.bos_id is not None or not chosen.n_windows:
            return 0
        return len(self.tokenizer.decode([chosen.first_input(0)]))

    def check_fit(self, n_vocab: int, eos_id: int, d_condition: int = 0) -> None:
        """Check that the model's vocabulary, EOS id and condition width match the data.

        An id beyond the vocabulary would be read as another token.
        """
        width = 0 if self.condition is None else self.condition.width
        if width != d_condition:
            if not width:
                fix = "set --data.condition builtin, or --model.d-condition 0"
                raise invalid(
                    "data.condition", None, f"embeddings of width {d_condition}: the model is conditioned on them", fix
                )
            needs = f"{width}, the width of the embeddings of data.condition ({self.cfg.condition})"
            raise invalid("model.d_condition", d_condition, needs, f"use --model.d-condition {width}")
        if self.n_vocab > n_vocab:
            raise invalid("model.n_vocab", n_vocab, f"at least the data's {self.n_vocab} ids", f"use {self.n_vocab}")
        if self.tokenizer.eos_id != eos_id:
            needed = self.tokenizer.eos_id
            raise invalid("model.end_id", eos_id, f"the EOS id of the data, {needed}", f"use {needed}")

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the content of all splits. A resumed run compares it to detect changed data."""
        parts = [self.split(name).fingerprint() for name in SPLITS]
        parts += [] if self.condition is None else [self.condition.fingerprint]
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """Return plain values for logs, reports and the run's JSON files; `warnings` are sentences for the user."""
        return {
            **self.origin,
            "kind": self.kind,
            "shape": self.shape,
            "tokenizer": {"kind": self.tokenizer.kind, "fingerprint": self.tokenizer.fingerprint},
            "n_vocab": self.n_vocab,
            "sequence_len": self.cfg.sequence_len,
            "splits": {
                name: {
                    "files": split.n_documents,
                    "bytes": split.n_bytes,
                    "words": split.n_words,
                    "tokens": split.n_tokens,
                    "windows": split.n_windows,
                    "fingerprint": split.fingerprint(),
                }
                for name, split in ((name, self.split(name)) for name in SPLITS)
            },
            "fingerprint": self.fingerprint,
            "warnings": self.warnings(),
        }

    def warnings(self) -> list[str]:
        messages: list[str] = []
        if self.train.n_tokens < self.cfg.sequence_len:
            messages.append(
                f"The training text has {self.train.n_tokens} tokens, fewer than one sequence of "
                f"{self.cfg.sequence_len}: the rest of a sequence is padding. A smaller --data.sequence-len is faster."
            )
        for name, fraction in (("validation", self.cfg.validation_fraction), ("test", self.cfg.test_fraction)):
            if fraction and not self.split(name).n_tokens:
                messages.append(f"The {name} split is empty: {fraction:g} of this source is less than one byte.")
        for where, reasons in self.origin["left_out"].items():
            # Empty files lose nothing, so they are counted in `left_out` but not reported as a warning.
            reported = format_left_out({reason: n for reason, n in reasons.items() if reason != "empty"})
            if reported:
                messages.append(f"Files left out of the {where}: {reported}.")
        return messages


def _empty(split: str, cfg: DataConfig) -> UserError:
    if split == "train":
        return UserError("the train split is empty. Fix: name a source with text in it.")
    fraction = cfg.validation_fraction if split == "validation" else cfg.test_fraction
    reason = f"data.{split}_fraction is {fraction:g}" + (", less than one byte of this source" if fraction else "")
    return UserError(
        f"the {split} split is empty ({reason}). Fix: set --data.{split}-fraction 0.05, or name files with "
        f"--data.{split}-files" + (", or use a larger source." if fraction else ".")
    )
