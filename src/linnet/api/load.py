"""`linnet.load`."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from linnet.api.run import Run
from linnet.core.dtypes import WeightDtype
from linnet.core.errors import invalid


def load(
    path: str | os.PathLike[str],
    *,
    checkpoint: str | int = "best",
    weights: WeightDtype = "float32",
    mesh: str = "",
    tokenizer: str | os.PathLike[str] | None = None,
) -> Run:
    """Load a trained model.

    Args:
        path: A run folder made by `linnet train` or `linnet import`, or a .safetensors file written by `linnet export`.
        checkpoint: `best` by validation loss (the latest if none was evaluated), `latest`, or a step.
        weights: Weight dtype: float32, bfloat16 or int8.
        mesh: Device mesh for the model, such as `model=2`. Default: one device.
        tokenizer: Tokenizer of an exported file, which does not contain one: a file, or a folder with one. Not needed for bytes.

    Returns:
        The run, with its weights in memory.

    Raises:
        UserError: If there is no run at `path`, or it has no such checkpoint.
    """
    if weights not in ("float32", "bfloat16", "int8"):
        raise invalid("weights", weights, "float32, bfloat16 or int8", "use float32")
    from linnet.parallel.cluster import init_jax
    from linnet.runs.load import decoding_mesh, open_run, read_config

    path = Path(path)
    cfg = read_config(path)
    if not cfg.reads_tokens and weights == "int8":
        raise invalid("weights", weights, "float32 or bfloat16 for a prior, which is small", "leave it out")
    init_jax()
    loaded = open_run(path, str(checkpoint), weights, decoding_mesh(path, mesh))
    if tokenizer is not None:
        from linnet.tokenizers.load import open_tokenizer

        loaded = dataclasses.replace(loaded, tokenizer=open_tokenizer(str(tokenizer)))
    return Run(loaded, weights=weights, mesh=mesh)
