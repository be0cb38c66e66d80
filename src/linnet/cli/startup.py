"""What every command that computes does first."""

from __future__ import annotations

import os
from pathlib import Path


def prepare_jax() -> None:
    """Compiled programs are kept on disk, so that the second start is quick. JAX's own variable moves or disables the place."""
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        jax.config.update("jax_compilation_cache_dir", str(base / "linnet" / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
