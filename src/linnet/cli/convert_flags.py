"""Flags of `linnet import` and `linnet export`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from linnet.cli.flags import Layout
from linnet.core.dtypes import WeightDtype


@dataclasses.dataclass(frozen=True)
class OptimFlags:
    """transformer-vq: training settings of the checkpoint, which its file does not contain."""

    lr: float | None = None
    """Peak learning rate. Default: that of --settings."""
    schedule: Literal["cosine", "linear", "inv_sqrt", "constant"] | None = None
    """Learning rate schedule. Default: that of --settings."""
    warmup_steps: int | None = None
    """Linear learning rate warm-up, in updates. Default: that of --settings."""
    steps: int | None = None
    """Length of the schedule in updates, warm-up included. Default: that of --settings."""
    extra_steps: int | None = None
    """Further updates at the final learning rate. Default: that of --settings."""
    clip: float | None = None
    """Gradient clipping by global norm. Default: that of --settings."""
    decay: float | None = None
    """Weight decay per update. Default: that of --settings."""


@dataclasses.dataclass(frozen=True)
class ImportFlags:
    layout: ClassVar[Layout] = {
        "": ("out", "source", "tokenizer", "begin-id", "settings", "optimizer"),
        "transformer-vq": (
            *(
                "block-len",
                "mem-len",
                "sequence-len",
                "update-len",
                "pe-lam",
                "e-scale",
                "agg-cache",
                "max-unpacked-gb",
            ),
            *(f"optim.{name}" for name in ("lr", "schedule", "warmup-steps", "steps", "extra-steps", "clip", "decay")),
        ),
        "grok-1": ("weights", "plan"),
        "dalle2-prior": ("which", "text-encodings", "release"),
    }
    kind: Annotated[Literal["transformer-vq", "safetensors", "grok-1", "dalle2-prior"], tyro.conf.Positional]
    """File format. transformer-vq: an official Transformer-VQ checkpoint (Flax msgpack; a folder of them, of which the newest
    checkpoint_N is read; or an .npz with '/'-joined names); safetensors: an export of Linnet; grok-1: the release's folder
    with ckpt-0, or a Hugging Face conversion (a .safetensors file or a folder of several); dalle2-prior: a checkpoint of
    DALLE2-pytorch's prior (.pth of a trainer, a model or an EMA)."""
    file: Annotated[Path | None, tyro.conf.Positional] = None
    """File or folder to import. May be left out with --plan."""
    out: Path | None = None
    """Folder of the new run. Required, except for dalle2-prior. Default: runs/FILE."""
    block_len: int | None = None
    """Block length in training (512 in the paper). Default: that of the file or of --settings."""
    mem_len: int | None = None
    """Attention window in training (512 in the paper). Default: that of the file or of --settings."""
    sequence_len: int | None = None
    """Sequence length in tokens (8192 in the paper), after which the state is reset. The evaluation loss depends on it.
    Default: that of --settings, else --update-len."""
    update_len: int | None = None
    """Tokens per sequence and update (2048 in the paper). Default: that of --settings, else four blocks."""
    pe_lam: float | None = None
    """Longest wavelength of the sinusoids. Default: that of the file or of --settings."""
    e_scale: float | None = None
    """Multiplier of the logits (in the paper: 1 for enwik8, 0.005 for PG-19 and ImageNet64). Default: that of the file or of
    --settings."""
    agg_cache: bool | None = None
    """Whether tokens older than the window are attended to through the compressed cache. Default: that of the file or of
    --settings."""
    source: str | None = None
    """Data of the run: text, or embedding pairs for a prior. Default: the source code of this Python's standard library, or
    emoji-pairs."""
    tokenizer: str | None = None
    """Tokenizer of the model, saved with the run: a sentencepiece .model, a tokenizer.json, or a folder with one. For
    third-party models it follows its own library exactly; for a Linnet export it follows the exported run. Default: bytes."""
    begin_id: Literal["end", "none"] | int | None = None
    """BOS id, prepended to every sequence: `end` (the EOS id), `none`, or an id. Default: that of the file, else none for grok-1 (the
    release expects prompts without BOS) and `end` for others."""
    settings: Path | None = None
    """Model settings. grok-1: a config.json with the sizes. dalle2-prior: the JSON file it was trained with. transformer-vq: a
    JSON object of the arguments of launch.py. Default: a file in or next to the checkpoint, if there is one; for grok-1 else
    the published sizes."""
    optim: OptimFlags = dataclasses.field(default_factory=OptimFlags)
    which: Literal["ema", "online"] = "ema"
    """Import the EMA weights or the trained (online) weights, if the file has both."""
    text_encodings: bool = False
    """The model was trained with text token encodings. The weights do not show this; --settings includes it."""
    release: str | None = None
    """DALLE2-pytorch release that trained the model, such as 1.4.2. The same weights compute different results in different
    releases. Default: the release saved in the file."""
    optimizer: Literal["auto", "keep", "fresh"] = "auto"
    """dalle2-prior, transformer-vq: import the optimizer state, step and EMA of a trainer checkpoint, so that `linnet train`
    resumes from it. auto: if the file has them; keep: fail if it does not; fresh: start at step 0."""
    weights: WeightDtype = "float32"
    """Convert matrices to this dtype while importing. Weights of lower precision are kept as they are."""
    max_unpacked_gb: float | None = None
    """Reject an .npz that unpacks to more gigabytes than this. Default: 100 times its packed size, at least 0.27."""
    plan: bool = False
    """Only print the requirements for importing and serving, and the number of devices needed."""


@dataclasses.dataclass(frozen=True)
class ExportFlags:
    run: Annotated[Path, tyro.conf.Positional]
    """Run folder."""
    out: Path | None = None
    """Output file (grok-hf: folder). Default: RUN.safetensors, RUN-transformer-vq/checkpoint_STEP, RUN.npz, RUN-hf or RUN.pth
    next to the run."""
    format: Literal[
        "safetensors", "transformer-vq", "transformer-vq-npz", "grok-hf", "dalle2-prior", "dalle2-trainer"
    ] = "safetensors"
    """safetensors: weights, codebooks and config, which `linnet import safetensors` restores bit for bit. transformer-vq: the
    Flax msgpack file that the official code loads (weights, codebooks, optimizer state, step). transformer-vq-npz (or
    transformer-vq with --out FILE.npz): the official parameter tree as .npz, weights and codebooks only. grok-hf: safetensors
    with the names of Grok-1's Hugging Face conversions, 8-bit weights as float32. dalle2-prior: the EMA weights of a prior
    with DALLE2-pytorch's names, as the .pth that its tracker saves as `model` (or the same state dict as safetensors, if --out
    ends in .safetensors). dalle2-trainer: a complete trainer checkpoint with optimizer state."""
    checkpoint: str = "best"
    """Checkpoint to load: best (by validation loss; the latest if none was evaluated), latest, or a step."""
