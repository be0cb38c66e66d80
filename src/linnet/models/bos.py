"""BOS policy of a token model: the id, if any, that is prepended to every sequence."""

from __future__ import annotations

from typing import Literal

from linnet.core.errors import UserError, invalid

BeginId = Literal["end"] | int | None
"""BOS setting of a config. `end` is the EOS id, which models are trained with unless their config sets another. None prepends
nothing.

The configs exclude the field from `repr`, which the fingerprint of a model is computed from: the policy does not change the meaning
of a saved session, and sessions that were saved before the field existed must still load."""


def check_begin(begin_id: BeginId, n_vocab: int) -> None:
    if isinstance(begin_id, int) and not 0 <= begin_id < n_vocab:
        needs = f"an id below model.n_vocab ({n_vocab}), 'end' or none"
        raise invalid("model.begin_id", begin_id, needs, "use the tokenizer's, or end")


def bos_id(begin_id: BeginId, end_id: int) -> int | None:
    return end_id if begin_id == "end" else begin_id


def in_front(bos: int | None, add_special_tokens: bool | None) -> tuple[int, ...]:
    """Return the ids prepended to a prompt that starts a sequence. `add_special_tokens`: None or True follow the model's policy."""
    return () if bos is None or add_special_tokens is False else (bos,)


def empty_prompt(bos: int | None) -> UserError:
    """Return the error for an empty prompt without BOS: there is no token to predict from."""
    why = "the model has no begin-of-sequence id" if bos is None else "add_special_tokens is false"
    fix = "give a prompt of at least one token" + ("" if bos is None else ", or leave add_special_tokens out")
    return invalid("the prompt", "empty", f"at least one token: {why}", fix)
