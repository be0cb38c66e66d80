"""Flags of `linnet import` and `linnet export`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from linnet.core.dtypes import WeightDtype


@dataclasses.dataclass(frozen=True)
class OptimFlags:
    """transformer-vq: training settings of the checkpoint, which its file does not contain."""

    lr: float | None = None
    schedule: Literal["cosine", "linear", "inv_sqrt", "constant"] | None = None
    warmup_steps: int | None = None
    steps: int | None = None
    """Length of the schedule in updates, warm-up included."""
    extra_steps: int | None = None
    clip: float | None = None
    decay: float | None = None


@dataclasses.dataclass(frozen=True)
class ImportFlags:
    kind: Annotated[Literal["transformer-vq", "safetensors", "grok-1", "dalle2-prior"], tyro.conf.Positional]
    """File format: an official Transformer-VQ checkpoint (Flax msgpack; a folder of them, of which the newest checkpoint_N is read;
    or an .npz of '/'-joined names); Linnet's own export; Grok-1 (the release's folder with ckpt-0, or a Hugging Face conversion: a
    .safetensors file or a folder of several); or a checkpoint of DALLE2-pytorch's prior (.pth of a trainer, a model or an EMA)."""
    file: Annotated[Path | None, tyro.conf.Positional] = None
    out: Path | None = None
    """Folder of the new run. Default for dalle2-prior: runs/FILE."""
    block_len: int | None = None
    """Block length in training, if the file does not contain it (512 in the paper)."""
    mem_len: int | None = None
    sequence_len: int | None = None
    """transformer-vq: tokens per sequence, after which the state is reset (8192 in the paper). The evaluation loss depends on it."""
    update_len: int | None = None
    """transformer-vq: tokens of each sequence per update (2048 in the paper)."""
    pe_lam: float | None = None
    e_scale: float | None = None
    """Embedding scale. In the paper: 1 for enwik8, 0.005 for PG-19 and ImageNet64."""
    agg_cache: bool | None = None
    source: str | None = None
    """Data of the run: text (default: the source code of this Python's standard library), or embedding pairs for a prior."""
    tokenizer: str | None = None
    """Tokenizer of the model, saved with the run: a sentencepiece .model, a tokenizer.json, or a folder with one. For third-party
    models it follows its own library exactly; for a Linnet export it follows the exported run."""
    begin_id: Literal["end", "none"] | int | None = None
    """BOS id, prepended to every sequence: `end` (the EOS id), `none`, or an id. Default: that of the file, else none for grok-1 (the
    release expects prompts without BOS) and `end` for others."""
    settings: Path | None = None
    """grok-1: a config.json with the model's sizes. Default: one in or next to the checkpoint, else the published sizes.
    dalle2-prior: the JSON it was trained with, for settings that the weights do not show. transformer-vq: a JSON object of
    launch.py's arguments."""
    optim: OptimFlags = dataclasses.field(default_factory=OptimFlags)
    which: Literal["ema", "online"] = "ema"
    """dalle2-prior: import the EMA weights or the trained (online) ones, if the file has both."""
    text_encodings: bool = False
    """dalle2-prior: the model was trained with text token encodings. The weights do not show this; --settings includes it."""
    release: str | None = None
    """dalle2-prior: the DALLE2-pytorch release that trained it, such as 1.4.2, instead of the one saved in the file. The same weights
    compute different results in different releases."""
    optimizer: Literal["auto", "keep", "fresh"] = "auto"
    """dalle2-prior, transformer-vq: import the optimizer state, step and EMA of a trainer checkpoint, so that `linnet train` resumes
    from it. `auto`: if the file has them; `keep`: an error if it does not; `fresh`: training starts at step 0."""
    weights: WeightDtype = "float32"
    """grok-1: convert matrices to this dtype while importing. Weights of lower precision are kept as they are."""
    max_unpacked_gb: float | None = None
    """transformer-vq: reject an .npz that unpacks to more gigabytes than this. Default: 100 times its packed size, at least 0.27."""
    plan: bool = False
    """grok-1: only print the requirements for importing and serving, and the number of devices needed. FILE may be omitted."""


@dataclasses.dataclass(frozen=True)
class ExportFlags:
    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    out: Path | None = None
    """Output file (grok-hf: folder). Default: RUN.safetensors, RUN-transformer-vq/checkpoint_STEP, RUN.npz, RUN-hf or RUN.pth next to
    the run."""
    format: Literal[
        "safetensors", "transformer-vq", "transformer-vq-npz", "grok-hf", "dalle2-prior", "dalle2-trainer"
    ] = "safetensors"
    """`safetensors`: weights, codebooks and config, which `linnet import safetensors` restores bit for bit; `transformer-vq`: the Flax
    msgpack file that the official code loads (weights, codebooks, optimizer state, step); `transformer-vq-npz` (or `transformer-vq`
    with --out FILE.npz): the official tree as .npz, weights and codebooks only; `grok-hf`: safetensors with the names of Grok-1's
    Hugging Face conversions, 8-bit weights as float32; `dalle2-prior`: a prior's EMA weights with DALLE2-pytorch's names, as the .pth
    that its tracker saves as `model` (or the same state dict as safetensors, if --out ends in .safetensors); `dalle2-trainer`: a
    complete trainer checkpoint with optimizer state."""
    checkpoint: str = "best"
    """`best` (by validation loss; the latest if there is none), `latest`, or a step."""
