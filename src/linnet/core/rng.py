"""Named random streams: a draw depends on the seed, its name and its step, never on what was drawn before it."""

from __future__ import annotations

import zlib

import jax
from jaxtyping import Array, Int, PRNGKeyArray, UInt32


def root(seed: int | UInt32[Array, ""]) -> PRNGKeyArray:
    return jax.random.key(seed)


def fold_in_name(key: PRNGKeyArray, name: str) -> PRNGKeyArray:
    """The stream called `name` below `key`. CRC32, not hash(): Python's own hash changes from process to process."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def fold_in(key: PRNGKeyArray, step: int | Int[Array, ""]) -> PRNGKeyArray:
    return jax.random.fold_in(key, step)


def sample_key(seed: int | UInt32[Array, ""]) -> PRNGKeyArray:
    """What a sample with this seed is drawn by: in a server as by a command, so that both give the same."""
    return fold_in_name(root(seed), "sample")
