"""The reference files that are installed with the package: `linnet verify` without arguments checks an installation with them."""

from __future__ import annotations

from pathlib import Path

GOLDENS = Path(__file__).parent / "goldens"


def installed_goldens() -> tuple[Path, ...]:
    """A few files of each model family, in the order of their names."""
    return tuple(sorted(GOLDENS.rglob("*.npz")))
