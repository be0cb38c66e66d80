"""The state of a conversation (the model's memory of it), and its file format.

The file is safetensors with the model's fingerprint and a checksum: a state of another model, or one that was truncated or altered,
is rejected.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.core.errors import UserError
from linnet.core.files import parse_json
from linnet.core.pytree import named_leaves

FORMAT, VERSION, META = "linnet-state", 1, "linnet"
DTYPES: dict[str, Any] = {"F32": np.float32, "BF16": jnp.bfloat16, "I32": np.int32}
"""Dtypes of the arrays in a state, by their names in the file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """State of a conversation. All tokens but the last are in `memory`; the last is read when the conversation continues."""

    memory: Any
    """The model family's own pytree of arrays."""
    last: int
    n_tokens: int
    """Tokens so far, including the last one and the BOS id."""
    model: str
    """Fingerprint of the weights and config that made it."""
    n_front: int = 1
    """BOS ids before the conversation, which are not part of it: 1 or 0."""

    @property
    def n_conversation(self) -> int:
        """Tokens of the conversation without the BOS id."""
        return self.n_tokens - self.n_front


def model_fingerprint(params: Any, buffers: Any, config: Any) -> str:
    """Return a SHA-256 of the config and every bit of the weights."""
    digest = hashlib.sha256(repr(config).encode())
    for name, leaf in named_leaves((params, buffers)):
        digest.update(f"{name}{leaf.dtype}{leaf.shape}".encode())
        digest.update(_raw(leaf))
    return digest.hexdigest()


def to_bytes(state: State) -> bytes:
    from safetensors.numpy import save

    arrays = {name: np.ascontiguousarray(np.asarray(leaf)) for name, leaf in named_leaves(state.memory)}
    fields: dict[str, Any] = {"last": state.last, "n_tokens": state.n_tokens, "model": state.model}
    if state.n_front != 1:  # omitted for 1, so that such files keep their old format
        fields["n_front"] = state.n_front
    meta = {"format": FORMAT, "version": VERSION, "about": fields, "sha256": _checksum(arrays, fields)}
    # A single entry, because safetensors writes several in arbitrary order, and equal states must give equal files.
    return save(arrays, {META: json.dumps(meta)})


def from_bytes(content: bytes, abstract_state: Callable[[int], Any], model: str) -> State:
    """Deserialize and validate a state. `abstract_state(n)` gives the shapes of the model's memory of `n` tokens."""
    from safetensors import SafetensorError, deserialize

    try:
        arrays = {name: _array(stored) for name, stored in deserialize(content)}
        size = int.from_bytes(content[:8], "little")
        meta = parse_json(parse_json(content[8 : 8 + size])["__metadata__"][META])
        fields = meta["about"]
        if meta["format"] != FORMAT or meta["version"] != VERSION or fields["model"] is None:
            raise KeyError("format")
        checksum, n_tokens, last = meta["sha256"], int(fields["n_tokens"]), int(fields["last"])
        n_front = int(fields.get("n_front", 1))
    except (SafetensorError, ValueError, KeyError, TypeError):
        raise UserError(
            "the state is damaged, or the file is not a session state. Fix: use the file as it was saved."
        ) from None
    if checksum != _checksum(arrays, fields):
        raise UserError(
            "the state was modified after it was saved (wrong checksum). Fix: use the file as it was saved."
        )
    if fields["model"] != model:
        raise UserError(
            f"the state belongs to another model ({fields['model'][:12]}; this one is {model[:12]}). Fix: restore it with the model "
            "that created it."
        )
    shape = abstract_state(n_tokens - 1) if 0 < n_tokens < 1 << 40 else None
    wanted = dict(named_leaves(shape))
    fits = arrays.keys() == wanted.keys() and all(
        arrays[name].shape == leaf.shape and arrays[name].dtype == leaf.dtype for name, leaf in wanted.items()
    )
    if shape is None or not fits:
        raise UserError("the state does not match this model's shapes. Fix: restore it with the model that created it.")
    leaves = [arrays[name] for name in wanted]
    memory = jax.tree.unflatten(jax.tree.structure(shape), leaves)
    return State(memory=memory, last=last, n_tokens=n_tokens, model=model, n_front=n_front)


def _array(stored: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(stored["data"], DTYPES[stored["dtype"]]).reshape(stored["shape"])


def _checksum(arrays: dict[str, np.ndarray], fields: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(f"{name}{arrays[name].dtype}{arrays[name].shape}".encode())
        digest.update(_raw(arrays[name]))
    return digest.hexdigest()


def _raw(leaf: Any) -> bytes | memoryview:
    """Return the array's bytes. Viewed as uint8, because numpy has no buffer protocol for types such as bfloat16."""
    array = np.ascontiguousarray(np.asarray(leaf))
    return array.reshape(-1).view(np.uint8).data


class UniqueBytes:
    """Total size of the states added to it. An array that several of them share counts once."""

    def __init__(self) -> None:
        self._n_uses: Counter[int] = Counter()
        self.total = 0

    def add(self, state: Any) -> None:
        for leaf in jax.tree.leaves(state):
            self.total += 0 if self._n_uses[id(leaf)] else leaf.nbytes
            self._n_uses[id(leaf)] += 1

    def remove(self, state: Any) -> None:
        """Stop counting a state that was added."""
        for leaf in jax.tree.leaves(state):
            self._n_uses[id(leaf)] -= 1
            if not self._n_uses[id(leaf)]:
                del self._n_uses[id(leaf)]
                self.total -= leaf.nbytes
