"""Named random keys: a value depends only on the seed, its name and its step, not on what was sampled before it."""

from __future__ import annotations

import zlib

import jax
from jaxtyping import Array, Int, PRNGKeyArray, UInt32


def root(seed: int | UInt32[Array, ""]) -> PRNGKeyArray:
    return jax.random.key(seed)


def fold_in_name(key: PRNGKeyArray, name: str) -> PRNGKeyArray:
    """Fold a name into `key`. Uses CRC32, because Python's hash() of a string differs between processes."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def fold_in(key: PRNGKeyArray, step: int | Int[Array, ""]) -> PRNGKeyArray:
    return jax.random.fold_in(key, step)


def sample_key(seed: int | UInt32[Array, ""]) -> PRNGKeyArray:
    """Return the key of a sample with this seed. The server and the commands share it, so that both give the same result."""
    return fold_in_name(root(seed), "sample")
