"""What every command that computes does first."""

from __future__ import annotations

import os

from linnet.parallel import cluster


def init_jax() -> None:
    """Compiled programs are kept on disk, so that the second start is quick. JAX's own variable moves or disables the place.
    Then the other processes are met, if there are any: before the first device is asked for."""
    import jax

    from linnet.core.files import cache_folder

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    cluster.initialize()
