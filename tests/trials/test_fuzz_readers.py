"""Mutated files: every reader returns or raises UserError, within 5 seconds of CPU time and 1 GB of memory per file."""

from __future__ import annotations

import os

import pytest
from fuzz_formats import READERS
from fuzz_readers import fuzz

N_TRIAL = int(os.environ.get("LINNET_FUZZ_FILES", "20000"))
N_QUICK = 30
"""In the default suite, all readers in one process."""


def test_few_mutated_files_of_every_format_are_read_or_rejected() -> None:
    results = fuzz(list(READERS), N_QUICK)
    failures = [failure for result in results.values() for failure in result.failures]
    assert not failures, "\n\n".join(failures)
    assert {name: result.n_files for name, result in results.items()} == dict.fromkeys(READERS, N_QUICK)


@pytest.mark.trial
@pytest.mark.parametrize("name", READERS)
def test_mutated_files_are_read_or_rejected(name: str) -> None:
    result = fuzz([name], N_TRIAL, seed=1)[name]
    print(
        f"| {name} | {result.n_seeds} | {result.n_files:,} | {result.n_refused:,} | {len(result.failures)} "
        f"| {result.worst_seconds:.2f} s | {result.worst_bytes / 1e6:.0f} MB |"
    )
    assert not result.failures, "\n\n".join(result.failures[:20])
    assert result.n_files == N_TRIAL
