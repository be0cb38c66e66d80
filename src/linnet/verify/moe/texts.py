"""Check the texts in a file of the released runner's streams (prompt ids and decoded output) with the tokenizer that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from linnet.tokenizers.base import Tokenizer, decode_text
from linnet.tokenizers.load import open_tokenizer
from linnet.verify.compare import Check
from linnet.verify.moe.files import read_json
from linnet.verify.recomputed import Recomputed


def recompute_texts(path: Path, runs: list[dict[str, Any]], recomputed: Recomputed) -> None:
    texts = {f"runs/{number}": run for number, run in enumerate(runs) if isinstance(run.get("text"), str)}
    if not texts:
        return
    stated = read_json(path).get("tokenizer")
    file = path.parent / Path(str(stated)).name
    if not isinstance(stated, str) or not file.is_file():
        for name in texts:
            recomputed.skipped[f"{name}/text"] = "the tokenizer that the file names is not beside it"
        return
    tokenizer = open_tokenizer(str(file), rules="released")
    recomputed.notes.append(f"texts are tokenized with {file.name}, as by sentencepiece")
    for name, run in texts.items():
        recomputed.checks += _checks(tokenizer, name, run)


def _checks(tokenizer: Tokenizer, name: str, run: dict[str, Any]) -> list[Check]:
    ids = tokenizer.encode(run["text"].encode()).tolist()
    checks = [_compare_exact(f"{name}/text", ids, run["prompt"])]
    if "out_text" in run:
        checks.append(_compare_exact(f"{name}/out_text", decode_text(tokenizer, run["out"]), run["out_text"]))
    return checks


def _compare_exact(name: str, got: Any, want: Any) -> Check:
    note = "equal" if got == want else f"ours {str(got)[:60]}, theirs {str(want)[:60]}"
    return Check(name, float(got != want), got == want, note)
