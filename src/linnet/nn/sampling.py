"""Token sampling from logits. Each row has its own settings and random number, so its result does not depend on the batch.

Letters: B rows, A vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from linnet.core.errors import invalid
from linnet.core.pytree import pytree
from linnet.nn.sampling_bounds import MIN_REPETITION_PENALTY, MIN_TEMPERATURE

MASKED = -1e10  # the reference's logit of a masked token
NUCLEUS_SLACK = 1e-4  # the reference's nucleus is smaller than requested by this probability


@pytree
class SamplingSettings:
    """Sampling settings with one value per row."""

    temperature: Float[Array, " B"]  # 0: greedy
    top_p: Float[Array, " B"]  # 1: off
    top_k: Int[Array, " B"]  # 0: off
    min_p: Float[Array, " B"]  # 0: off
    typical_p: Float[Array, " B"]  # 1: off
    repetition_penalty: Float[Array, " B"]  # 1: off
    presence_penalty: Float[Array, " B"]  # subtracted from the logit of every generated token
    frequency_penalty: Float[Array, " B"]  # subtracted once for each occurrence


@pytree
class LogitMask:
    """Per-token constraints, one row per request. When given, token counts cover generated tokens only, not the prompt."""

    bias: Float[Array, "B A"]  # added to the logits; -inf forbids
    min_token_mask: Bool[Array, "B A"]  # forbidden before position `min_token_until`
    min_token_until: Int[Array, " B"]
    in_prompt: Bool[Array, "B A"]  # tokens of the prompt, to which the repetition penalty also applies


def sampling_settings(
    n: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
) -> SamplingSettings:
    """Validate the settings and repeat them for `n` rows."""
    if temperature != 0.0 and not MIN_TEMPERATURE <= temperature < float("inf"):
        needs = f"0 (greedy), or at least {MIN_TEMPERATURE:g} and finite"
        raise invalid("temperature", temperature, needs, "use 1.0")
    if not 0.0 < top_p <= 1.0:
        raise invalid("top_p", top_p, "above 0 and at most 1", "use 1.0 to keep all tokens, 0.9 for the likely ones")
    if top_k < 0:
        raise invalid("top_k", top_k, "0 (off) or more", "use 0 to keep all tokens")
    if not 0.0 <= min_p <= 1.0:
        raise invalid("min_p", min_p, "between 0 (off) and 1", "use 0.0 to keep all tokens")
    if not MIN_REPETITION_PENALTY <= repetition_penalty < float("inf"):
        needs = f"at least {MIN_REPETITION_PENALTY:g} and finite"
        raise invalid("repetition_penalty", repetition_penalty, needs, "use 1.0 for none")
    if not 0.0 < typical_p <= 1.0:
        raise invalid("typical_p", typical_p, "above 0 and at most 1", "use 1.0 to keep all tokens")
    for name, value in (("presence_penalty", presence_penalty), ("frequency_penalty", frequency_penalty)):
        if not abs(value) < float("inf"):
            raise invalid(name, value, "finite", "use 0.0 for none")

    def rows(value: float) -> Float[Array, " B"]:
        return jnp.full((n,), value, jnp.float32)

    return SamplingSettings(
        temperature=rows(temperature),
        top_p=rows(top_p),
        top_k=jnp.full((n,), min(top_k, jnp.iinfo(jnp.int32).max), jnp.int32),
        min_p=rows(min_p),
        typical_p=rows(typical_p),
        repetition_penalty=rows(repetition_penalty),
        presence_penalty=rows(presence_penalty),
        frequency_penalty=rows(frequency_penalty),
    )


def uniforms(keys: Key[Array, " B"], position: Int[Array, " B"]) -> Float[Array, " B"]:
    """Return one uniform number in [0, 1) per row, which depends only on the row's key and position."""
    return jax.vmap(lambda key, at: jax.random.uniform(jax.random.fold_in(key, at)))(keys, position)


def sample(
    logits: Float[Array, "B A"],
    settings: SamplingSettings,
    chance: Float[Array, " B"],
    seen: Int[Array, "B A"] | None = None,
    rules: LogitMask | None = None,
    position: Int[Array, " B"] | None = None,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Sample a token for each row and return it with its log-probability in the model's own distribution (before any setting).
    `chance` is the row's number from `uniforms`; `seen` counts the row's tokens so far; `position` is that of the sampled token
    (for `rules`). Greedy rows break ties by the lowest index."""
    scores = logits if seen is None else penalise(logits, settings, seen, rules)
    if rules is not None:
        assert position is not None
        too_early = rules.min_token_mask & (position < rules.min_token_until)[:, None]
        scores = jnp.where(too_early, -jnp.inf, scores + rules.bias)
    greedy = settings.temperature <= 0.0
    warm = scores / jnp.where(greedy, 1.0, settings.temperature)[:, None]
    weight = jnp.exp(warm - jnp.max(warm, axis=-1, keepdims=True))
    upto = jnp.cumsum(jnp.where(allowed(warm, settings), weight, 0.0), axis=-1)
    # Inverse-CDF sampling: the first token whose cumulative weight exceeds `chance` times the total, so never one of weight zero.
    drawn = jnp.sum(upto <= chance[:, None] * upto[:, -1:], axis=-1)
    tokens = jnp.where(greedy, jnp.argmax(scores, axis=-1), drawn).astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - jax.nn.logsumexp(logits, axis=-1)


def allowed(scores: Float[Array, "B A"], settings: SamplingSettings) -> Bool[Array, "B A"]:
    """Return which tokens pass top-k, then top-p, then typical-p, then min-p, each applied to the tokens left by the one before.
    Sorting is skipped if no row needs it; a row that does not need it keeps all tokens either way."""

    def by_rank(scores: Float[Array, "B A"]) -> Bool[Array, "B A"]:
        keep = top_k_mask(scores, settings.top_k)
        inside = nucleus_mask(jnp.where(keep, scores, -jnp.inf), settings.top_p)
        return keep & (inside | (settings.top_p >= 1.0)[:, None])

    asked = jnp.any((settings.top_k > 0) | (settings.top_p < 1.0))
    keep = jax.lax.cond(asked, by_rank, lambda scores: jnp.ones(scores.shape, bool), scores)
    typical = jax.lax.cond(
        jnp.any(settings.typical_p < 1.0),
        lambda scores: typical_mask(scores, settings.typical_p),
        lambda scores: jnp.ones(scores.shape, bool),
        jnp.where(keep, scores, -jnp.inf),
    )
    keep = keep & (typical | (settings.typical_p >= 1.0)[:, None])
    # min-p is relative to the most likely remaining token; each filter leaves at least one.
    likeliest = jnp.max(jnp.where(keep, scores, -jnp.inf), axis=-1, keepdims=True)
    return keep & (scores >= likeliest + jnp.log(settings.min_p)[:, None])


def nucleus(logits: Float[Array, "B A"], p: float | Float[Array, " B"]) -> Float[Array, "B A"]:
    """Keep the most likely tokens whose total probability reaches p; set the other logits to MASKED."""
    return jnp.where(nucleus_mask(logits, p), logits, MASKED)


def nucleus_mask(logits: Float[Array, "B A"], p: float | Float[Array, " B"]) -> Bool[Array, "B A"]:
    """Return the tokens of the nucleus. A token stays if its probability plus that of all less likely tokens exceeds 1 - p, with the
    reference's slack; the most likely token always stays. As in the reference, the last of equal tokens ranks highest."""
    beyond = jnp.asarray(1.0 - (p - NUCLEUS_SLACK), jnp.float32)[..., None]
    probability = jax.nn.softmax(logits, axis=-1)
    rising = _sort(probability)
    n_kept = jnp.maximum(jnp.sum(jnp.cumsum(rising, axis=-1) > beyond, axis=-1, keepdims=True), 1)
    threshold = jnp.take_along_axis(rising, logits.shape[-1] - n_kept, axis=-1)
    more, equal = probability > threshold, probability == threshold
    equal_from_here = jnp.cumsum(equal[:, ::-1], axis=-1)[:, ::-1]
    return more | (equal & (equal_from_here <= n_kept - jnp.sum(more, axis=-1, keepdims=True)))


def top_k_mask(scores: Float[Array, "B A"], k: Int[Array, " B"]) -> Bool[Array, "B A"]:
    """Return the k most likely tokens and any ties with the k-th. k = 0 keeps all."""
    size = scores.shape[-1]
    probability = jax.nn.softmax(scores, axis=-1)
    rank = jnp.where(k > 0, jnp.clip(size - k, 0, size - 1), 0)
    return probability >= jnp.take_along_axis(_sort(probability), rank[:, None], axis=-1)


def typical_mask(scores: Float[Array, "B A"], p: Float[Array, " B"]) -> Bool[Array, "B A"]:
    """Return the tokens whose surprisal is nearest to the entropy, until their total probability reaches p; ties are all kept."""
    surprise = -jax.nn.log_softmax(scores, axis=-1)
    probability = jnp.exp(-surprise)
    mean = jnp.sum(jnp.where(probability > 0, probability * surprise, 0.0), axis=-1, keepdims=True)
    distance = jnp.where(probability > 0, jnp.abs(surprise - mean), jnp.inf)
    order = jnp.argsort(distance, axis=-1)
    before = jnp.cumsum(jnp.take_along_axis(probability, order, axis=-1), axis=-1)
    n_kept = jnp.sum(before < p[:, None], axis=-1, keepdims=True)  # rank of the last token needed
    rank = jnp.minimum(n_kept, scores.shape[-1] - 1)
    return distance <= jnp.take_along_axis(jnp.take_along_axis(distance, order, axis=-1), rank, axis=-1)


def _sort(probability: Float[Array, "B A"]) -> Float[Array, "B A"]:
    """Sort ascending. Nonnegative floats sort like their integer bits, which is ten times faster on CPU than sorting floats."""
    bits = jax.lax.bitcast_convert_type(probability, jnp.int32)
    return jax.lax.bitcast_convert_type(jax.lax.sort(bits, dimension=-1, is_stable=False), jnp.float32)


def penalise(
    logits: Float[Array, "B A"], settings: SamplingSettings, seen: Int[Array, "B A"], rules: LogitMask | None = None
) -> Float[Array, "B A"]:
    """Apply the penalties. Repetition divides a positive logit of a token that occurred by the penalty and multiplies a negative one.
    Presence and frequency penalties are subtracted from the logits of generated tokens."""
    occurred = seen > 0 if rules is None else (seen > 0) | rules.in_prompt
    penalty = settings.repetition_penalty[:, None]
    scores = jnp.where(occurred, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    written = seen.astype(jnp.float32)
    taken = (
        settings.presence_penalty[:, None] * jnp.minimum(written, 1.0) + settings.frequency_penalty[:, None] * written
    )
    return scores - taken
