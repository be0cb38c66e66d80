"""The bytes of states that are kept. States may share arrays; each array counts once, for as long as anyone keeps it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax


class HeldBytes:
    def __init__(self) -> None:
        self._keepers: Counter[int] = Counter()
        self.total = 0

    def add(self, state: Any) -> None:
        for leaf in jax.tree.leaves(state):
            self.total += 0 if self._keepers[id(leaf)] else leaf.nbytes
            self._keepers[id(leaf)] += 1

    def drop(self, state: Any) -> None:
        """One that was added, and is let go."""
        for leaf in jax.tree.leaves(state):
            self._keepers[id(leaf)] -= 1
            if not self._keepers[id(leaf)]:
                del self._keepers[id(leaf)]
                self.total -= leaf.nbytes
