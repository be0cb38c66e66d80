"""Write a random checkpoint in the layout of Grok-1's release (`python -m benchmarks.grok_checkpoint CONFIG FOLDER`).

It runs as a separate program for two reasons: the release's quantized weights are pickled as a class of `__main__`, and the memory
used for writing must not count as the importer's.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from linnet.config.codec import run_from_dict
from linnet.convert.grok.leaves import specs_by_name
from linnet.convert.grok.names import QUANTIZED, file_order
from linnet.convert.grok.sizes import scale_groups
from linnet.models.moe.config import MoEConfig


class QuantizedWeight8bit:
    def __init__(self, weight: np.ndarray, scales: np.ndarray) -> None:
        self.weight, self.scales = weight, scales


def write_checkpoint(cfg: MoEConfig, folder: Path) -> int:
    """Write the checkpoint and return the bytes of its largest tensor."""
    folder.mkdir(parents=True)
    generator, specs, largest = np.random.default_rng(0), specs_by_name(cfg), 0
    for number, (_, weight, layer) in enumerate(file_order(cfg)):
        shape = specs[weight.leaf].shape[0 if layer is None else 1 :]
        if weight.leaf in QUANTIZED:
            groups = scale_groups(weight.leaf, shape[-2])
            values = generator.integers(-127, 128, shape, np.int8)
            scales = generator.uniform(0.001, 0.02, (*shape[:-2], groups, shape[-1])).astype(jnp.bfloat16)
            stored = QuantizedWeight8bit(values, scales)
        else:
            values = stored = generator.normal(size=shape).astype(np.float32)
        largest = max(largest, values.nbytes)
        with (folder / f"tensor{number:05d}_000").open("wb") as file:
            pickle.dump(stored, file, protocol=4)
    return largest


def main() -> None:
    cfg = run_from_dict(json.loads(sys.argv[1])).model
    assert isinstance(cfg, MoEConfig)
    print(write_checkpoint(cfg, Path(sys.argv[2])))


if __name__ == "__main__":
    main()
