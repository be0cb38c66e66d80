"""The config of a run: frozen, validated on construction, and stored in `config.json`."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeVar

from linnet.config.tuning import LoraConfig, Parent
from linnet.core.errors import UserError, invalid
from linnet.models import registry
from linnet.models.model_config import DataKind, ModelConfig, PairModelConfig, TokenModelConfig
from linnet.models.prior.config import PriorConfig
from linnet.models.vq.config import VQConfig
from linnet.parallel.mesh import BATCH_AXES, data_parallel_size, parse_mesh

EMBEDDED_CORPUS = "python-stdlib"
EMOJI_PAIRS = "emoji-pairs"
M = TypeVar("M", bound=ModelConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    source: str = EMBEDDED_CORPUS
    """Training data: a text file, folder or glob, data written by `linnet data prepare`, or a built-in dataset
    (`python-stdlib`: the source code of this Python's standard library)."""
    validation_files: tuple[str, ...] = ()
    """Files or globs held out for validation. If empty: `validation_fraction` of the source."""
    test_files: tuple[str, ...] = ()
    """Files or globs held out for the test split. If empty: `test_fraction` of the source."""
    validation_fraction: float = 0.05
    """Fraction of the source held out for validation."""
    test_fraction: float = 0.05
    """Fraction of the source held out for testing."""
    sequence_len: int = 2048
    """Sequence length in tokens. The recurrent state is carried across the updates of a sequence and reset after it."""
    update_len: int = 2048
    """Tokens per sequence and optimizer update (truncated backpropagation through time)."""
    batch_size: int = 8
    """Global batch size in sequences."""
    condition: str | None = None
    """Images: conditioning embeddings for a model with `model.d_condition`. `builtin`: computed by the built-in encoder; or an
    .npy file with one row per image, in order."""

    base: str | None = None
    """Folder that relative paths refer to: the working directory in which training was started. Recorded automatically."""

    def __post_init__(self) -> None:
        for name in ("sequence_len", "update_len", "batch_size"):
            if getattr(self, name) < 1:
                raise invalid(f"data.{name}", getattr(self, name), "at least 1", f"set --data.{name.replace('_', '-')}")
        if self.sequence_len % self.update_len:
            raise invalid(
                "data.sequence_len",
                self.sequence_len,
                f"a multiple of data.update_len ({self.update_len})",
                f"use {_round_up(self.sequence_len, self.update_len)}, or an update_len that divides {self.sequence_len}",
            )
        if not (0 <= self.validation_fraction < 1 and 0 <= self.test_fraction < 1):
            raise invalid(
                "data.validation_fraction / data.test_fraction",
                (self.validation_fraction, self.test_fraction),
                "at least 0 and below 1",
                "use 0.05 and 0.05",
            )
        if self.validation_fraction + self.test_fraction >= 1:
            raise invalid(
                "data.validation_fraction + data.test_fraction",
                self.validation_fraction + self.test_fraction,
                "below 1, so that something is left to train on",
                "use 0.05 and 0.05",
            )

    @property
    def updates_per_sequence(self) -> int:
        return self.sequence_len // self.update_len

    @property
    def n_per_row(self) -> int:
        """Tokens of a row in one update."""
        return self.update_len


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairsConfig:
    source: str = EMOJI_PAIRS
    """Embedding pairs: a folder with img_emb/ and text_emb/ (clip-retrieval layout; captions in metadata/), parquet files with
    embedding columns, webdataset tars with .npy members, an .npz file, or `emoji-pairs`."""
    images: str | None = None
    """With `texts`, instead of `source`: .npy files of the image embeddings (a file, folder or glob)."""
    texts: str | None = None
    """The .npy files of the text embeddings, one per image file."""
    metadata: str | None = None
    """The parquet files with the captions, one per image file."""
    encodings: str | None = None
    """With `images` and `texts`: .npy files of the text token encodings, one per image file. None: text_encodings/ next to the
    folder text_emb/ given as `texts`. Only read with model.text_encodings."""
    image_key: str | None = None
    """Name of the image embeddings: column (parquet), array (.npz) or member suffix (webdataset). None: try common names."""
    text_key: str | None = None
    """Name of the text embeddings, like `image_key`. None: try common names."""
    caption_key: str = "caption"
    """Column (parquet) or array (.npz) of the captions."""
    split_key: str | None = None
    """Column or array that assigns rows to splits: booleans (true: test), or the strings train, validation and test."""
    validation_fraction: float = 0.05
    """Fraction held out for validation. Rows are split in order: training, validation, test."""
    test_fraction: float = 0.05
    """Fraction held out for testing."""
    batch_size: int = 64
    """Global batch size in pairs."""
    max_unpacked_gb: float | None = None
    """Reject an .npz that unpacks to more gigabytes than this. None: 100 times its packed size, at least 0.27."""
    mix: float = 0.0
    """Mixup probability: interpolate a training pair with another (both vectors by one random weight, norms kept). Counters
    overfitting on small datasets."""

    base: str | None = None
    """Folder that relative paths refer to: the working directory in which training was started. Recorded automatically."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise invalid("data.batch_size", self.batch_size, "at least 1", "use 64")
        if not 0 <= self.mix <= 1:
            raise invalid("data.mix", self.mix, "between 0 and 1", "use 0 for none")
        fractions = (self.validation_fraction, self.test_fraction)
        if not all(0 <= fraction < 1 for fraction in fractions) or sum(fractions) >= 1:
            raise invalid(
                "data.validation_fraction / data.test_fraction",
                fractions,
                "at least 0 and together below 1, so that something is left to train on",
                "use 0.05 and 0.05",
            )
        if (self.texts or self.metadata or self.encodings) and not self.images:
            given = "texts" if self.texts else "metadata" if self.metadata else "encodings"
            raise invalid("data.images", self.images, f"given where data.{given} is", "name the image embeddings too")

    @property
    def updates_per_sequence(self) -> int:
        """Always 1: a pair is read in one update."""
        return 1

    @property
    def n_per_row(self) -> int:
        """Always 1: a row is one pair."""
        return 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    name: Literal["adamw", "lion", "adafactor", "muon"] = "adamw"
    """Optimizer."""
    lr: float = 4e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "inv_sqrt", "constant", "dampened_constant", "dampened_cosine"] = "cosine"
    """Learning rate schedule. `dampened_*`, as in the prior's reference: the warm-up multiplies a schedule that starts at the first
    update, and the cosine decays to 0."""
    warmup_steps: int = 100
    """Linear learning rate warm-up, in updates."""
    steps: int = 1000
    """Number of optimizer updates: the length of the learning rate schedule, warm-up included."""
    extra_steps: int = 0
    """Further updates at the final learning rate."""
    clip: float | None = 0.1
    """Gradient clipping by global norm. None: no clipping."""
    decay: float = 0.0
    """Weight decay per update, not scaled by the learning rate. Vectors are excluded."""
    decay_by_lr: bool = False
    """Scale the weight decay by the learning rate, as PyTorch's AdamW does."""
    decay_vectors: bool = False
    """Apply weight decay to vectors (biases, gains) too: `group_wd_params=False` of DALLE2-pytorch."""
    b1: float = 0.9
    """Adam beta1 (also for Muon's non-matrix parameters)."""
    b2: float = 0.98
    """Adam beta2 (also for Muon's non-matrix parameters)."""
    eps: float = 1e-9
    """Adam epsilon (also for Muon's non-matrix parameters)."""
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
    """Lion: storage dtype of the momentum. The official Transformer-VQ uses bfloat16."""

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise invalid("optim.lr", self.lr, "above 0", "use 4e-4")
        if self.steps < 1:
            raise invalid("optim.steps", self.steps, "at least 1", "set --optim.steps")
        if self.warmup_steps < 0 or self.extra_steps < 0:
            raise invalid(
                "optim.warmup_steps / optim.extra_steps", (self.warmup_steps, self.extra_steps), "0 or more", "use 0"
            )
        # The dampened schedules do not start after the warm-up, so a warm-up longer than the run is valid.
        if self.warmup_steps >= self.steps and not self.schedule.startswith("dampened"):
            raise invalid(
                "optim.warmup_steps",
                self.warmup_steps,
                f"below optim.steps ({self.steps})",
                f"use {self.steps // 10}, or more steps",
            )
        if self.clip is not None and not self.clip > 0:
            raise invalid("optim.clip", self.clip, "above 0, or none", "use --optim.clip None for no clipping")
        if not 0 <= self.decay < 1:
            raise invalid("optim.decay", self.decay, "at least 0 and below 1", "use 0 for none")
        for name, usual in (("b1", 0.9), ("b2", 0.98)):
            if not 0 <= getattr(self, name) < 1:
                raise invalid(f"optim.{name}", getattr(self, name), "at least 0 and below 1", f"use {usual}")
        if not self.eps > 0:
            raise invalid("optim.eps", self.eps, "above 0", "use 1e-9")
        if self.momentum_dtype != "float32" and self.name != "lion":
            raise invalid("optim.momentum_dtype", self.momentum_dtype, f"float32 with {self.name}", "use it with lion")

    @property
    def total_steps(self) -> int:
        return self.steps + self.extra_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    accumulate: int = 1
    """Gradient accumulation: number of micro-batches per update. Same result with less memory."""
    ema_decay: float | None = None
    """Decay of an exponential moving average (EMA) of the parameters, used for evaluation, sampling and export. None: no EMA."""
    ema_power: float | None = None
    """EMA warm-up: the decay grows as 1 - (1 + age / ema_inv_gamma) ** -ema_power up to `ema_decay`, as in ema-pytorch (2/3 there).
    None: constant decay."""
    ema_inv_gamma: float = 1.0
    """EMA warm-up: time scale in updates (see `ema_power`)."""
    ema_min: float = 0.0
    """EMA warm-up: minimum decay."""
    ema_after: int = 0
    """EMA warm-up: until this update the EMA is a copy of the parameters (100 in ema-pytorch)."""
    ema_every: int = 1
    """EMA warm-up: update the EMA every N updates (10 in ema-pytorch)."""
    log_every: int = 20
    """Log metrics every N updates."""
    eval_every: int = 200
    """Evaluate every N updates. 0: only at the end."""
    eval_minutes: float = 0.0
    """Also evaluate every N minutes. 0: never by time."""
    eval_sequences: int | None = None
    """Number of validation sequences (or pairs) used during training. None: all. `linnet eval` always uses all."""
    eval_timesteps: tuple[int, ...] = (64,)
    """Prior: numbers of sampling steps at which the predicted embeddings are evaluated."""
    checkpoint_every: int = 200
    """Save a checkpoint every N updates. 0: never by updates."""
    checkpoint_minutes: float = 10.0
    """Also save a checkpoint every N minutes. 0: never by time."""
    keep: int = 3
    """Number of latest checkpoints to keep, in addition to the best by validation loss."""
    max_bad_steps: int = 10
    """Stop after this many consecutive updates with a NaN or infinite loss or gradient."""
    collapse_alarm: float = 0.1
    """Collapse warning threshold: warn if a codebook's usage perplexity falls below this fraction of its codes, or an expert's load
    below this fraction of a uniform load."""
    sample_tokens: int = 512
    """Tokens of the sample generated at each evaluation. 0: no sample."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Also log metrics to TensorBoard or Weights & Biases (needs the extra of that name)."""
    exports: tuple[str, ...] = ()
    """Prior: DALLE2-pytorch files to write during training, each as latest:checkpoint:PATH, best:checkpoint:PATH, latest:model:PATH
    or best:model:PATH. `checkpoint` includes the optimizer state, `model` has the EMA weights. A path may contain {epoch} and
    {samples_seen}."""

    def __post_init__(self) -> None:
        for name in ("accumulate", "log_every", "keep", "max_bad_steps"):
            if getattr(self, name) < 1:
                raise invalid(
                    f"train.{name}", getattr(self, name), "at least 1", f"set --train.{name.replace('_', '-')}"
                )
        for name in ("eval_every", "eval_minutes", "checkpoint_every", "sample_tokens", "checkpoint_minutes"):
            if getattr(self, name) < 0:
                raise invalid(f"train.{name}", getattr(self, name), "0 or more", "use 0 for never")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise invalid("train.ema_decay", self.ema_decay, "between 0 and 1, or none", "use 0.999")
        if self.ema_power is not None and self.ema_decay is None:
            raise invalid("train.ema_decay", None, "the largest decay where train.ema_power is set", "use 0.9999")
        if self.eval_sequences is not None and self.eval_sequences < 1:
            raise invalid("train.eval_sequences", self.eval_sequences, "at least 1, or none for all", "use None")
        if any(n < 2 for n in self.eval_timesteps):
            raise invalid("train.eval_timesteps", self.eval_timesteps, "numbers of steps from 2 on", "use 64")


DATA: dict[DataKind, type[DataConfig] | type[PairsConfig]] = {"tokens": DataConfig, "pairs": PairsConfig}
"""The data settings by what a family reads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    preset: str = "custom"
    """Name of the preset, recorded in config.json."""
    family: str = "vq"
    """Model family. It is determined by the preset."""
    seed: int = 0
    """Random seed of the initialization, data order and dropout."""
    mesh: str = ""
    """Device mesh, such as data=2,model=2. The batch is sharded over data, fsdp and expert; weights over fsdp, model and
    expert. A run can be resumed on another mesh. Default: one device."""
    model: ModelConfig = dataclasses.field(default_factory=VQConfig)
    data: DataConfig | PairsConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    parent: Parent | None = None
    """The parent of a fine-tuned run (`linnet train --from`). None: trained from scratch."""

    def __post_init__(self) -> None:
        model = registry.config_class(self.family)
        for name, known in (("model", model), ("data", DATA[model.READS])):
            if not isinstance(getattr(self, name), known):
                got, needs = type(getattr(self, name)).__name__, known.__name__
                raise invalid(name, got, f"{needs} with family {self.family!r}", "use the family's own")
        self.model.check_run(self.data, self.train)
        if self.data.batch_size % self.train.accumulate:
            raise invalid(
                "data.batch_size",
                self.data.batch_size,
                f"a multiple of train.accumulate ({self.train.accumulate})",
                f"use {_round_up(self.data.batch_size, self.train.accumulate)}",
            )
        if not 0 <= self.seed < 2**32:
            raise invalid("seed", self.seed, "between 0 and 2**32 - 1", "use 0")
        self._check_mesh()

    def _check_mesh(self) -> None:
        sizes = parse_mesh(self.mesh)
        rows, parts = self.data.batch_size // self.train.accumulate, data_parallel_size(sizes)
        if rows % parts:
            named = " x ".join(f"{name}={sizes[name]}" for name in BATCH_AXES if sizes[name] > 1)
            needs = f"rows of a micro-batch (data.batch_size / train.accumulate) in equal parts for {named} of the mesh"
            raise invalid("data.batch_size", self.data.batch_size, needs, self._fix_rows(parts))
        self.model.check_mesh(sizes)

    def _fix_rows(self, parts: int) -> str:
        fitting = _round_up(self.data.batch_size, parts * self.train.accumulate)
        return f"use --data.batch-size {fitting}, or a mesh whose axes {', '.join(BATCH_AXES)} make fewer parts"

    @property
    def reads_tokens(self) -> bool:
        """Whether the model is one of tokens."""
        return self.model.READS == "tokens"

    def model_as(self, config: type[M]) -> M:
        """Return the model config as that of one family. Raises for other families."""
        if not isinstance(self.model, config):
            name = registry.row_name(config)
            raise invalid("family", self.family, name, f"use a {name} preset or run")
        return self.model

    @property
    def vq(self) -> VQConfig:
        """The model config of a vq run. Raises for other families."""
        return self.model_as(VQConfig)

    @property
    def prior(self) -> PriorConfig:
        """The model config of a prior run. Raises for other families."""
        return self.model_as(PriorConfig)

    @property
    def lm(self) -> TokenModelConfig:
        """The model config of a token family. Raises for other families."""
        if not isinstance(self.model, TokenModelConfig):
            raise self._wrong_kind("tokens", "which write tokens")
        return self.model

    @property
    def pair_model(self) -> PairModelConfig:
        """The model config of a family that reads pairs of embeddings. Raises for other families."""
        if not isinstance(self.model, PairModelConfig):
            raise self._wrong_kind("pairs", "which reads pairs of embeddings")
        return self.model

    @property
    def d_condition(self) -> int:
        """Width of the conditioning embeddings; 0: unconditional."""
        return self.model.condition_width if isinstance(self.model, TokenModelConfig) else 0

    def _wrong_kind(self, reads: DataKind, words: str) -> UserError:
        needs = f"{' or '.join(registry.names(reads))}, {words}"
        return invalid("family", self.family, needs, "use a run of such a family")

    @property
    def tokens(self) -> DataConfig:
        """The data config of a token run. Raises for a prior."""
        if not isinstance(self.data, DataConfig):
            raise self._wrong_kind("tokens", "which read tokens")
        return self.data

    @property
    def pairs(self) -> PairsConfig:
        """The data config of a prior run. Raises for token runs."""
        if not isinstance(self.data, PairsConfig):
            raise self._wrong_kind("pairs", "which reads pairs of embeddings")
        return self.data


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to
