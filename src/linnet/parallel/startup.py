"""JAX startup, shared by the commands and the Python API."""

from __future__ import annotations

import os

from linnet.parallel import cluster


def init_jax() -> None:
    """Enable the persistent compilation cache (JAX_COMPILATION_CACHE_DIR moves or disables it), then connect to the other processes,
    if any, which must happen before devices are initialized. A cache folder that the caller has set is kept."""
    import jax

    from linnet.core.files import cache_folder

    chosen = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]  # its stubs omit the flags
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and chosen is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    cluster.initialize()
