"""`linnet sample`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from linnet.cli.parse import parse
from linnet.errors import refuse
from linnet.local_path import FreeText
from linnet.weights import Weights

if TYPE_CHECKING:
    from linnet.families.generate import Piece
    from linnet.nn.sampling import SamplingSettings

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


@dataclasses.dataclass(frozen=True)
class Flags:
    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    prompt: FreeText = ""
    """What the text begins with. Priors: what the picture shows."""
    prompt_file: Path | None = None
    """A file to take the prompt from."""
    prompt_ids: tuple[int, ...] = ()
    """The prompt as ids of the model's vocabulary, in place of a text."""
    add_special_tokens: bool | None = None
    """False: the model's begin id, if it has one, is not put in front of the prompt."""
    n: int = 1
    """How many samples. The first is the same whatever their number. Priors: so many are drawn, and the one most like the text is
    kept."""
    max_tokens: int | None = None
    """The longest a text may get (512); a `moe` run ends at its context. A picture is always whole."""
    temperature: float = 1.0
    """0 takes the likeliest token always."""
    top_p: float | None = None
    """Only the likeliest tokens that hold this probability together: 0.9 for text, 1 for pictures."""
    top_k: int = 0
    """Only the k likeliest tokens; 0: all."""
    min_p: float = 0.0
    """Only tokens at least so likely, relative to the likeliest."""
    repetition_penalty: float = 1.0
    seed: int = 0
    """Sample i is drawn by seed + i."""
    stop: tuple[FreeText, ...] = ()
    """End before any of these strings."""
    ignore_end: bool = False
    """Go on after the end of a document."""
    out: Path | None = None
    """Pictures: the folder for the PNGs and the sheet; RUN/samples/pictures if not given. Priors: for the embedding and the sheet of
    its nearest pictures; RUN/samples."""
    complete: tuple[Path, ...] = ()
    """Pictures: go on from the upper part of each of these (`--n` times each), which stays as it is."""
    keep: float = 0.5
    """Pictures: the share of the rows of `--complete` that is seen."""
    embedding: Path | None = None
    """Priors: an .npy with text embeddings (one, or a row each), in place of a prompt."""
    text_encodings: Path | None = None
    """Priors with model.text_encodings: an .npy with the token encodings that belong to `--embedding`, [texts, positions, width] or
    [positions, width] of one text; all zeros is padding. With a prompt they are computed."""
    steps: int | None = None
    """Priors: denoising steps (16 with dpm, 64 with ddim, all with ddpm)."""
    solver: Literal["dpm", "ddim", "ddpm"] | None = None
    """Priors: DPM-Solver++(2M) if not given, DDIM or DDPM."""
    guidance: float = 1.0
    """Priors: how much further than the text says; 1 is as trained."""
    nearest: int = 8
    """Priors: how many of the data's pictures to show."""
    checkpoint: str = "best"
    """`best` (by validation loss; the latest if there is none), `latest`, or a step."""
    weights: Weights = "float32"
    """The bits that weights are held in."""
    mesh: str = ""
    """Devices that share the model, as model=2 or model=2,expert=2; one if not given."""
    json: bool = False
    """Print one JSON object when all is done, instead of streaming."""


def sample_command(argv: list[str]) -> int:
    flags = parse(
        Flags,
        argv,
        "sample",
        "Writes text, paints pictures, or predicts a picture's embedding with a run. The same seed gives the same, always.",
    )
    if flags.n < 1:
        raise refuse("--n", flags.n, "at least 1", "use 1")
    if flags.max_tokens is not None and flags.max_tokens < 1:
        raise refuse("--max-tokens", flags.max_tokens, "at least 1", "use 512")
    if not 0 <= flags.seed < 2**32:
        raise refuse("--seed", flags.seed, "between 0 and 2**32 - 1", "use 0")
    from linnet import config as configs
    from linnet.cli.startup import prepare_jax
    from linnet.families.detokenize import TextAssembler, check_stops
    from linnet.families.generate import generate
    from linnet.train.runs import decoding_mesh, open_run

    if flags.prompt_ids and (flags.prompt or flags.prompt_file is not None):
        raise refuse("--prompt-ids", flags.prompt_ids, "given without a text", "leave out --prompt and --prompt-file")
    drawing_settings(flags, 1, 1.0)  # refuses what makes no sense before the run is opened
    check_stops(flags.stop)
    # Bytes that are no text come from the command line as surrogates; a prompt may have any.
    prompt = flags.prompt.encode(errors="surrogateescape") if flags.prompt_file is None else _read(flags.prompt_file)
    is_prior = configs.load(flags.run / "config.json").family == "prior"
    if is_prior:
        refuse_given(flags, TOKENS_ONLY, f"{flags.run} is a prior, which predicts an embedding")
        if flags.weights == "int8":
            raise refuse("--weights", flags.weights, "float32 or bfloat16 for a prior, which is small", "leave it out")
    else:
        refuse_given(flags, PRIORS_ONLY, f"{flags.run} is no prior")
    prepare_jax()
    run = open_run(flags.run, flags.checkpoint, flags.weights, decoding_mesh(flags.run, flags.mesh))
    if is_prior:
        from linnet.cli.sample_prior import predict

        return predict(flags, run, prompt)
    if run.vocabulary.shape is not None:
        refuse_given(flags, ("prompt_ids", "add_special_tokens"), f"{flags.run} paints pictures")
        from linnet.cli.sample_pictures import paint

        return paint(flags, run, run.vocabulary.shape)
    if flags.complete or flags.out is not None:
        raise refuse("--complete / --out", str(flags.run), "a run that paints pictures", "leave them out")
    tokenizer = run.vocabulary.tokenizer
    ids = list(flags.prompt_ids) or tokenizer.encode(prompt).tolist()
    # What is printed is then the decoded whole, as the tokenizer's own library decodes it; else the prompt as it was given.
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


def refuse_given(flags: Flags, names: tuple[str, ...], why: str) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(flags)}
    for name in names:
        if getattr(flags, name) != defaults[name]:
            shown = getattr(flags, name)
            field = f"--{name.replace('_', '-')}"
            raise refuse(field, str(shown) if isinstance(shown, Path) else shown, f"left out: {why}", "leave it out")


def drawing_settings(flags: Flags, n: int, top_p: float) -> SamplingSettings:
    from linnet.nn.sampling import sampling_settings

    return sampling_settings(
        n,
        temperature=flags.temperature,
        top_p=top_p if flags.top_p is None else flags.top_p,
        top_k=flags.top_k,
        min_p=flags.min_p,
        repetition_penalty=flags.repetition_penalty,
    )


def _print_many(stream: Iterator[list[Piece | None]], begin: str, n: int) -> None:
    """The first sample streams; the others follow whole."""
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
        raise refuse(
            "--prompt-file", str(path), f"a file that can be read ({error.strerror})", "check the path"
        ) from None
