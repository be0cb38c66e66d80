"""JAX startup, shared by all commands that compute."""

from __future__ import annotations

import os

from linnet.parallel import cluster


def init_jax() -> None:
    """Enable the persistent compilation cache (JAX_COMPILATION_CACHE_DIR moves or disables it), then connect to the other processes,
    if any, which must happen before devices are initialized."""
    import jax

    from linnet.core.files import cache_folder

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    cluster.initialize()
