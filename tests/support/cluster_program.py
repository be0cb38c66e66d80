"""A program for several processes that does what training does, without a model: all-reduce, report, sleep a little."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def main() -> None:
    """`cluster_program.py FOLDER STEPS [SLOW_PROCESS SLOW_SECONDS]`; each process writes its step to FOLDER/INDEX, and fails if
    there is a FOLDER/failINDEX."""
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    from linnet.parallel import cluster
    from linnet.parallel.cluster import init_jax

    init_jax()
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from linnet.train.stragglers import monitor

    me = cluster.describe()
    slow = float(sys.argv[4]) if len(sys.argv) > 3 and int(sys.argv[3]) == me.index else 0.0
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    x = jax.make_array_from_process_local_data(rows, np.ones((1, 8, 8), np.float32))
    update = jax.jit(lambda x: 0.01 * x + 0.01 * x.sum(0), out_shardings=rows)
    with monitor(
        log=lambda step, words: print(f"event at {step}: {words}", flush=True),
        notify=lambda words: print(words, flush=True),
        saved=lambda: 15,
    ) as watch:
        for step in range(1, steps + 1):
            x = jax.block_until_ready(update(x))
            start = time.perf_counter()
            time.sleep(0.01 + slow)
            watch.stepped(step, time.perf_counter() - start)
            if (folder / f"fail{me.index}").exists():
                raise OSError("told to fail")
            (folder / f"{me.index}.tmp").write_text(f"{os.getpid()} {step}")
            (folder / f"{me.index}.tmp").replace(folder / str(me.index))
    print(f"process {me.index} of {me.count} is done", flush=True)


if __name__ == "__main__":
    main()
