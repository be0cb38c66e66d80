"""The families by name."""

from __future__ import annotations

from typing import Any, cast

from linnet.errors import refuse
from linnet.families.family import Family


def get(name: str) -> Family:
    """Imported when asked for: `linnet --help` should not wait for JAX."""
    if name == "vq":
        from linnet.families.vq import family

        return cast(Family, cast(Any, family))
    if name == "moe":
        from linnet.families.moe import family

        return cast(Family, cast(Any, family))
    raise refuse("family", name, "vq or moe", "use one of them")
