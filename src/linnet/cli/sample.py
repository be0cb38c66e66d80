"""`linnet sample`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnet.cli.parse import parse
from linnet.cli.sample_flags import Flags, drawing_settings, refuse_given
from linnet.core.errors import invalid

if TYPE_CHECKING:
    from linnet.models.generate import Piece

MAX_TOKENS = 512
TEXT_TOP_P = 0.9
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
        "Writes text, paints pictures, or predicts a picture's embedding with a run. The same seed gives the same, always.",
    )
    if flags.n < 1:
        raise invalid("--n", flags.n, "at least 1", "use 1")
    if flags.max_tokens is not None and flags.max_tokens < 1:
        raise invalid("--max-tokens", flags.max_tokens, "at least 1", "use 512")
    if not 0 <= flags.seed < 2**32:
        raise invalid("--seed", flags.seed, "between 0 and 2**32 - 1", "use 0")
    from linnet.cli.startup import init_jax
    from linnet.config import codec as configs
    from linnet.models.detokenize import TextAssembler, check_stops
    from linnet.models.generate import generate
    from linnet.runs.load import decoding_mesh, open_run

    if flags.prompt_ids and (flags.prompt or flags.prompt_file is not None):
        raise invalid("--prompt-ids", flags.prompt_ids, "given without a text", "leave out --prompt and --prompt-file")
    drawing_settings(flags, 1, 1.0)  # validates the settings before the run is opened
    check_stops(flags.stop)
    # Python passes invalid UTF-8 on the command line as surrogates; a prompt may contain any bytes.
    prompt = flags.prompt.encode(errors="surrogateescape") if flags.prompt_file is None else _read(flags.prompt_file)
    is_prior = configs.load(flags.run / "config.json").family == "prior"
    if is_prior:
        refuse_given(flags, TOKENS_ONLY, f"{flags.run} is a prior, which predicts an embedding")
        if flags.weights == "int8":
            raise invalid("--weights", flags.weights, "float32 or bfloat16 for a prior, which is small", "leave it out")
    else:
        refuse_given(flags, PRIORS_ONLY, f"{flags.run} is no prior")
    init_jax()
    run = open_run(flags.run, flags.checkpoint, flags.weights, decoding_mesh(flags.run, flags.mesh))
    if is_prior:
        from linnet.cli.sample_prior import predict

        return predict(flags, run, prompt)
    if run.vocabulary.shape is not None:
        refuse_given(flags, ("prompt_ids", "add_special_tokens"), f"{flags.run} paints pictures")
        from linnet.cli.sample_pictures import paint

        return paint(flags, run, run.vocabulary.shape)
    if flags.complete or flags.out is not None:
        raise invalid("--complete / --out", str(flags.run), "a run that paints pictures", "leave them out")
    tokenizer = run.vocabulary.tokenizer
    ids = list(flags.prompt_ids) or tokenizer.encode(prompt).tolist()
    # If set, the prompt is printed as decoded from its ids, as the tokenizer's own library does; otherwise as it was given.
    shows_ids = bool(flags.prompt_ids) or tokenizer.rules == "released"
    stream = generate(
        run.writer.decoder,
        run.params,
        run.buffers,
        run.cfg.model,
        [ids] * flags.n,
        max_tokens=flags.max_tokens or MAX_TOKENS,
        settings=drawing_settings(flags, flags.n, TEXT_TOP_P),
        seeds=[(flags.seed + i) % 2**32 for i in range(flags.n)],
        stop=flags.stop,
        ignore_end=flags.ignore_end,
        text_rules=tokenizer.text_rules,
        add_special_tokens=flags.add_special_tokens,
        shows_prompt=shows_ids,
    )
    begin = TextAssembler(tokenizer.text_rules, before=ids).before if shows_ids else prompt.decode(errors="replace")
    if flags.json:
        _print_json(stream, begin, ids, flags)
    elif flags.n == 1:
        sys.stdout.write(begin)
        for (piece,) in stream:
            if piece is not None:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
        sys.stdout.write("\n")
    else:
        _print_many(stream, begin, flags.n)
    return 0


def _print_many(stream: Iterator[list[Piece | None]], begin: str, n: int) -> None:
    """Stream the first sample, then print the others."""
    texts: list[list[str]] = [[] for _ in range(n)]
    print(f"--- 1 of {n} ---")
    sys.stdout.write(begin)
    for pieces in stream:
        for i, piece in enumerate(pieces):
            if piece is None:
                continue
            if i == 0:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
            else:
                texts[i].append(piece.text)
    sys.stdout.write("\n")
    for i, parts in enumerate(texts[1:], start=2):
        print(f"--- {i} of {n} ---")
        print(begin + "".join(parts))


def _print_json(stream: Iterator[list[Piece | None]], begin: str, ids: list[int], flags: Flags) -> None:
    samples: list[dict[str, Any]] = [
        {"text": begin, "seed": flags.seed + i, "tokens": 0, "logprob": 0.0, "finish": None, "token_ids": []}
        for i in range(flags.n)
    ]
    for pieces in stream:
        for sample, piece in zip(samples, pieces, strict=True):
            if piece is not None:
                sample["text"] += piece.text
                sample["tokens"] += len(piece.tokens)
                sample["token_ids"] += piece.tokens
                sample["logprob"] += sum(piece.logprobs)
                sample["finish"] = piece.finish
    print(json.dumps({"run": str(flags.run), "prompt": begin, "prompt_ids": ids, "samples": samples}))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise invalid(
            "--prompt-file", str(path), f"a file that can be read ({error.strerror})", "check the path"
        ) from None
