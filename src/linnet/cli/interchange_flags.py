"""Flags of `linnet import` and `linnet export`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from linnet.core.dtypes import WeightDtype


@dataclasses.dataclass(frozen=True)
class OptimFlags:
    """transformer-vq: how the checkpoint was trained, which its file does not hold."""

    lr: float | None = None
    schedule: Literal["cosine", "linear", "inv_sqrt", "constant"] | None = None
    warmup_steps: int | None = None
    steps: int | None = None
    """Updates until the schedule ends (warm-up included)."""
    extra_steps: int | None = None
    clip: float | None = None
    decay: float | None = None


@dataclasses.dataclass(frozen=True)
class ImportFlags:
    kind: Annotated[Literal["transformer-vq", "safetensors", "grok-1", "dalle2-prior"], tyro.conf.Positional]
    """What the file is: an official Transformer-VQ checkpoint (Flax msgpack, a folder of them, of which the newest checkpoint_N is
    read, or an .npz of '/'-joined names), Linnet's own export,
    Grok-1: the release's folder with ckpt-0, or a Hugging Face conversion (a .safetensors file, or the folder of several), or a
    checkpoint of DALLE2-pytorch's prior (.pth: a trainer's, a model's, an average's)."""
    file: Annotated[Path | None, tyro.conf.Positional] = None
    out: Path | None = None
    """The folder of the new run (dalle2-prior: runs/FILE if not given)."""
    block_len: int | None = None
    """As the model was trained, where the file does not tell (the paper's: 512)."""
    mem_len: int | None = None
    sequence_len: int | None = None
    """transformer-vq: tokens of one sequence, after which the state is reset (the paper's: 8192); the loss of an evaluation
    depends on it."""
    update_len: int | None = None
    """transformer-vq: tokens of a sequence in one update (the paper's: 2048)."""
    pe_lam: float | None = None
    e_scale: float | None = None
    """The paper's: 1 for enwik8, 0.005 for PG-19 and ImageNet64."""
    agg_cache: bool | None = None
    source: str | None = None
    """Data to evaluate the run on: text (this Python's standard library if not given), or pairs of embeddings for a prior."""
    tokenizer: str | None = None
    """What the model's ids mean, kept with the run: a sentencepiece .model, a tokenizer.json, or a folder with one. The file of a
    model from elsewhere is used as its own library uses it, an export's as the exported run used it."""
    begin_id: Literal["end", "none"] | int | None = None
    """What stands in front of every sequence: `end` (the id that ends a document), `none`, or an id. If not given: what the file
    says, else none for grok-1 (the release reads bare prompts) and `end` for others."""
    settings: Path | None = None
    """grok-1: a config.json with the model's sizes; one that lies in or beside the checkpoint is used if not given, else the
    published sizes. dalle2-prior: the JSON it was trained with, for what weights do not tell. transformer-vq: a JSON object of
    launch.py's arguments."""
    optim: OptimFlags = dataclasses.field(default_factory=OptimFlags)
    which: Literal["ema", "online"] = "ema"
    """dalle2-prior: the averaged weights or the trained ones, where the file has both."""
    text_encodings: bool = False
    """dalle2-prior: it was trained with the token encodings of its texts, which weights do not show (and --settings states)."""
    release: str | None = None
    """dalle2-prior: the release of DALLE2-pytorch that trained it, as in 1.4.2, instead of the one saved in the file. Networks with
    the same weights compute different things in different releases."""
    optimizer: Literal["auto", "keep", "fresh"] = "auto"
    """dalle2-prior, transformer-vq: the optimizer state and step (and average) of a trainer's checkpoint, from which `linnet train`
    continues. `auto`: kept where the file has them; `keep`: an error where it has not; `fresh`: training starts at step 0."""
    weights: WeightDtype = "float32"
    """grok-1: bring matrices to so few bits while importing. What has fewer already stays as it is."""
    max_unpacked_gb: float | None = None
    """transformer-vq: refuse an .npz that unpacks to more gigabytes than this. If not given: 100 times its packed size, and at least
    0.27."""
    plan: bool = False
    """grok-1: only say what importing and serving need, and on how many devices the model fits. FILE may be left out."""


@dataclasses.dataclass(frozen=True)
class ExportFlags:
    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    out: Path | None = None
    """The file (grok-hf: the folder); RUN.safetensors, RUN-transformer-vq/checkpoint_STEP, RUN.npz, RUN-hf or RUN.pth beside the run
    if not given."""
    format: Literal[
        "safetensors", "transformer-vq", "transformer-vq-npz", "grok-hf", "dalle2-prior", "dalle2-trainer"
    ] = "safetensors"
    """`safetensors`: weights, codebooks and config, read back bit for bit by `linnet import safetensors`; `transformer-vq`: the
    Flax msgpack file that the official code loads (weights, codebooks, optimizer state, step); `transformer-vq-npz` (or
    `transformer-vq` with --out FILE.npz): the official tree as .npz, weights and codebooks only; `grok-hf`: safetensors by the
    names of Grok-1's Hugging Face conversions, 8-bit weights as float32;
    `dalle2-prior`: a prior's averaged weights by DALLE2-pytorch's names, as the .pth that its tracker saves as `model` (or, with an
    --out that ends in .safetensors, the same state dict there); `dalle2-trainer`: a whole trainer checkpoint with optimizer state."""
    checkpoint: str = "best"
    """`best` (by validation loss; the latest if there is none), `latest`, or a step."""
