"""`linnet sample`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnet.api.results import GeneratedText
from linnet.api.text import MAX_TOKENS, TOP_P
from linnet.cli.parse import parse
from linnet.cli.sample_flags import Flags, check_not_given, read_sampling
from linnet.core.errors import invalid

if TYPE_CHECKING:
    from linnet.api.run import Run

Pieces = Iterator[list[GeneratedText | None]]
TOKENS_ONLY = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop",
    "ignore_end",
    "complete",
    "keep",
    "prompt_ids",
    "add_special_tokens",
)
PRIORS_ONLY = ("embedding", "text_encodings", "steps", "solver", "guidance", "nearest")


def sample_command(argv: list[str]) -> int:
    flags = parse(
        Flags,
        argv,
        "sample",
        "Generate text or images with a run, or predict image embeddings with a prior. The same seed gives the same output.",
    )
    if flags.n < 1:
        raise invalid("--n", flags.n, "at least 1", "use 1")
    if flags.max_tokens is not None and flags.max_tokens < 1:
        raise invalid("--max-tokens", flags.max_tokens, "at least 1", "use 512")
    if not 0 <= flags.seed < 2**32:
        raise invalid("--seed", flags.seed, "between 0 and 2**32 - 1", "use 0")
    from linnet.api.load import load
    from linnet.models.detokenize import check_stops
    from linnet.runs.load import read_config

    if flags.prompt_ids and (flags.prompt or flags.prompt_file is not None):
        raise invalid("--prompt-ids", flags.prompt_ids, "given without a text", "leave out --prompt and --prompt-file")
    read_sampling(flags, 1, 1.0)  # validates the settings before the run is opened
    check_stops(flags.stop)
    # Python passes invalid UTF-8 on the command line as surrogates; a prompt may contain any bytes.
    prompt = flags.prompt.encode(errors="surrogateescape") if flags.prompt_file is None else _read(flags.prompt_file)
    is_prior = not read_config(flags.run).reads_tokens
    if is_prior:
        check_not_given(flags, TOKENS_ONLY, f"{flags.run} is a prior, which predicts an embedding")
        if flags.weights == "int8":
            raise invalid("--weights", flags.weights, "float32 or bfloat16 for a prior, which is small", "leave it out")
    else:
        check_not_given(flags, PRIORS_ONLY, f"{flags.run} is not a prior")
    run = load(flags.run, checkpoint=flags.checkpoint, weights=flags.weights, mesh=flags.mesh)
    if is_prior:
        from linnet.cli.sample_prior import predict

        return predict(flags, run, prompt)
    if run.kind == "images":
        check_not_given(flags, ("prompt_ids", "add_special_tokens"), f"{flags.run} generates images")
        from linnet.cli.sample_images import write_images

        return write_images(flags, run)
    if flags.complete or flags.out is not None:
        raise invalid("--complete / --out", str(flags.run), "a run that generates images", "leave them out")
    return _write_text(flags, run, prompt)


def _write_text(flags: Flags, run: Run, prompt: bytes) -> int:
    import numpy as np

    ids = np.array(flags.prompt_ids, np.int32) if flags.prompt_ids else run.encode(prompt)
    start: Any = ids if flags.prompt_ids else prompt
    stream = run.generate(
        [start] * flags.n,
        max_tokens=flags.max_tokens or MAX_TOKENS,
        temperature=flags.temperature,
        top_p=TOP_P if flags.top_p is None else flags.top_p,
        top_k=flags.top_k,
        min_p=flags.min_p,
        repetition_penalty=flags.repetition_penalty,
        seed=[(flags.seed + i) % 2**32 for i in range(flags.n)],
        stop=flags.stop,
        ignore_eos=flags.ignore_end,
        add_special_tokens=flags.add_special_tokens is not False,
        echo=True,
        stream=True,
    )
    if flags.json:
        _print_json(stream, ids.tolist(), flags)
    elif flags.n == 1:
        for (piece,) in stream:
            if piece is not None:
                sys.stdout.write(piece)
                sys.stdout.flush()
        sys.stdout.write("\n")
    else:
        _print_many(stream, flags.n)
    return 0


def _print_many(stream: Pieces, n: int) -> None:
    """Stream the first sample, then print the others."""
    texts: list[list[str]] = [[] for _ in range(n)]
    print(f"--- 1 of {n} ---")
    for pieces in stream:
        for i, piece in enumerate(pieces):
            if piece is None:
                continue
            if i == 0:
                sys.stdout.write(piece)
                sys.stdout.flush()
            else:
                texts[i].append(piece)
    sys.stdout.write("\n")
    for i, parts in enumerate(texts[1:], start=2):
        print(f"--- {i} of {n} ---")
        print("".join(parts))


def _print_json(stream: Pieces, ids: list[int], flags: Flags) -> None:
    begin, *_ = next(stream)  # the prompt
    samples: list[dict[str, Any]] = [
        {"text": str(begin), "seed": flags.seed + i, "tokens": 0, "logprob": 0.0, "finish": None, "token_ids": []}
        for i in range(flags.n)
    ]
    for pieces in stream:
        for sample, piece in zip(samples, pieces, strict=True):
            if piece is not None:
                sample["text"] += piece
                sample["tokens"] += len(piece.token_ids)
                sample["token_ids"] += piece.token_ids
                sample["logprob"] += sum(piece.logprobs)
                sample["finish"] = piece.finish_reason
    print(json.dumps({"run": str(flags.run), "prompt": begin, "prompt_ids": ids, "samples": samples}))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise invalid(
            "--prompt-file", str(path), f"a file that can be read ({error.strerror})", "check the path"
        ) from None
