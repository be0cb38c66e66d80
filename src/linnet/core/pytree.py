"""Frozen dataclasses registered as JAX pytrees, used for parameters, states and batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(**kwargs: Any) -> Any:
    """Declare a field that is part of the tree structure, not a leaf."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Make `cls` a frozen keyword-only dataclass and register it as a pytree whose key paths are the field names."""
    made: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    # A tree may have specs, shardings or layers stacked on another axis in place of the arrays that its fields declare, and JAX
    # makes such trees by the constructor: run-time type checkers must not check it.
    made.__no_type_check__ = True
    fields = dataclasses.fields(made)
    meta = [f.name for f in fields if f.metadata.get("static")]
    data = [f.name for f in fields if not f.metadata.get("static")]
    return jax.tree_util.register_dataclass(made, data_fields=data, meta_fields=meta)


def tree_of(kind: type[T], /, **fields: Any) -> T:
    """Build a `kind` whose leaves are not the arrays that its fields declare: Specs, or abstract arrays. Logical axes and
    PartitionSpecs have types of their own, `sharding.AxesTree` and `sharding.PSpecTree`."""
    return kind(**fields)


def replace(tree: T, **changes: Any) -> T:
    dataclass: Any = tree
    return dataclasses.replace(dataclass, **changes)


def n_bytes(tree: Any) -> int:
    """Return the total bytes of all arrays in the tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield each leaf with its '/'-joined path, the name used in files, messages and reports."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
        yield leaf_name(path), leaf


def leaf_name(path: tuple[Any, ...]) -> str:
    return "/".join(_key_name(key) for key in path)


def _key_name(key: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
