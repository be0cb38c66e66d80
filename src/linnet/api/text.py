"""Text generation and scores of a loaded run, behind `Run.generate` and `Run.score`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from linnet.api.results import GeneratedText, Score
from linnet.core.errors import invalid

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int32

    from linnet.models.generate import Piece
    from linnet.runs.load import LoadedRun

    Ids = Int32[np.ndarray, " n"]
    Prompt = str | bytes | Ids
    Prompts = list[str] | list[bytes] | list[Ids]

MAX_TOKENS, TOP_P = 512, 0.9
"""Defaults of text generation, shared with `linnet sample`."""
MAX_SEED = 2**32 - 1


class TokenOptions(TypedDict, total=False):
    """Keyword arguments of every method that generates text. `Run.generate` documents them."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    stop: str | Sequence[str]
    ignore_eos: bool


class SessionOptions(TokenOptions, total=False):
    """Keyword arguments of `Session.generate`."""

    seed: int


class SamplingOptions(TokenOptions, total=False):
    """Keyword arguments of `Run.generate`."""

    seed: int | Sequence[int]
    add_special_tokens: bool
    echo: bool


def generate_texts(
    run: LoadedRun,
    prompt: Prompt | Prompts,
    *,
    seed: int | Sequence[int],
    stop: str | Sequence[str],
    echo: bool,
    stream: bool,
    max_tokens: int,
    ignore_eos: bool,
    add_special_tokens: bool,
    **settings: Any,
) -> Any:
    """Generate a text per prompt, as `Run.generate` describes. `settings` are those of `sampling_settings`."""
    is_list = isinstance(prompt, list | tuple)
    prompts: list[Any] = list(prompt) if is_list else [prompt]
    if not prompts:
        raise invalid("prompt", prompts, "at least one prompt", 'use "" to start from nothing')
    seeds = check_seeds(seed, len(prompts))
    from linnet.models.generate import generate
    from linnet.nn.sampling import sampling_settings

    tokenizer = run.vocabulary.tokenizer
    ids = [_ids(run, one) for one in prompts]
    # With these rules the prompt is shown as decoded from its ids, as the tokenizer's own library does.
    decodes_prompt = echo and (tokenizer.rules == "released" or not isinstance(prompts[0], str | bytes))
    pieces = generate(
        run.lm.decoder,
        run.params,
        run.buffers,
        run.cfg.model,
        ids,
        max_tokens=max_tokens,
        settings=sampling_settings(len(prompts), **settings),
        seeds=seeds,
        stop=[stop] if isinstance(stop, str) else list(stop),
        ignore_end=ignore_eos,
        text_rules=tokenizer.text_rules,
        add_special_tokens=add_special_tokens,
        shows_prompt=decodes_prompt,
    )
    echoes = [_prompt_text(run, one, ids[i], decodes_prompt) for i, one in enumerate(prompts)] if echo else []
    rows = _texts(pieces, echoes, seeds)
    if stream:
        return rows if is_list else (row[0] for row in rows if row[0] is not None)
    parts: list[list[GeneratedText]] = [[] for _ in prompts]
    for row in rows:
        for i, piece in enumerate(row):
            parts[i] += [] if piece is None else [piece]
    texts = [GeneratedText.from_pieces(one) for one in parts]
    return texts if is_list else texts[0]


def score_text(run: LoadedRun, text: str | bytes, nats: Callable[..., Any]) -> Score:
    from linnet.evaluate.score import score_ids

    tokenizer, data = run.vocabulary.tokenizer, to_utf8(text)
    ids = tokenizer.encode(data)
    if not len(ids):
        raise invalid("text", text, "at least one token", "leave it out")
    logprobs = score_ids(run.lm, run.cfg, run.params, run.buffers, ids.tolist(), nats)
    unpredicted = len(tokenizer.decode(ids[:1])) if run.cfg.lm.bos_id is None else 0
    return Score(
        text=text if isinstance(text, str) else text.decode(errors="replace"),
        tokens=tuple(tokenizer.pieces(ids)),
        token_ids=ids,
        logprobs=logprobs,
        n_bytes=len(data) - unpredicted,
    )


def to_utf8(text: str | bytes) -> bytes:
    if isinstance(text, bytes):
        return text
    if not isinstance(text, str):
        raise invalid("the text", text, "a str or bytes", "convert it")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise invalid("the text", ascii(text), "valid Unicode, without lone surrogates", "pass it as bytes") from None


def check_seeds(seed: int | Sequence[int], n: int) -> list[int]:
    """Return one seed per prompt."""
    seeds = [seed] * n if isinstance(seed, int) else list(seed)
    if len(seeds) != n:
        raise invalid(
            "seed", f"{len(seeds)} seeds", f"one number, or one for each of the {n} prompts", "give one number"
        )
    for one in seeds:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= MAX_SEED:
            raise invalid("seed", one, "between 0 and 2**32 - 1", "use 0")
    return seeds


def _ids(run: LoadedRun, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str | bytes):
        return run.vocabulary.tokenizer.encode(to_utf8(prompt)).tolist()
    if getattr(prompt, "ndim", None) != 1:
        raise invalid("prompt", prompt, "a str or bytes, or an array of token ids", "convert it")
    return [int(token) for token in prompt]


def _prompt_text(run: LoadedRun, prompt: Prompt, ids: list[int], decodes: bool) -> str:
    if decodes or not isinstance(prompt, str | bytes):
        from linnet.models.detokenize import TextAssembler

        return TextAssembler(run.vocabulary.tokenizer.text_rules, before=ids).before
    return prompt if isinstance(prompt, str) else prompt.decode(errors="replace")


def _texts(
    pieces: Iterator[list[Piece | None]], echoes: list[str], seeds: list[int]
) -> Iterator[list[GeneratedText | None]]:
    if echoes:
        yield [GeneratedText(text, seed=seed) for text, seed in zip(echoes, seeds, strict=True)]
    for row in pieces:
        yield [
            None
            if piece is None
            else GeneratedText(
                piece.text,
                token_ids=piece.tokens,
                logprobs=piece.logprobs,
                finish_reason=piece.finish,
                seed=seed,
            )
            for piece, seed in zip(row, seeds, strict=True)
        ]
