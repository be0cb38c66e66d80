"""`linnet.train`: train a model from Python, exactly as `linnet train` does."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnet.core.errors import UserError, invalid

if TYPE_CHECKING:
    from linnet.api.run import Run
    from linnet.config.schema import RunConfig
    from linnet.convert.dalle2.schema import DallE2Config

OnStep = Callable[[int, dict[str, float]], None]


class TrainingResult:
    """A run that was trained, or interrupted and saved."""

    def __init__(self, path: Path, step: int, finished: bool) -> None:
        self.path = path
        self.step = step
        self.finished = finished
        """False if Ctrl-C stopped the run. Its state is saved, and the same call resumes it."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """All records of the run's `metrics.jsonl`, in order. `kind` is train, eval, test or event."""
        from linnet.runs.metrics import read_metrics

        return read_metrics(self.path)

    def load(self, checkpoint: str | int = "best") -> Run:
        """Load the trained model."""
        from linnet.api.load import load

        return load(self.path, checkpoint=checkpoint)

    def __repr__(self) -> str:
        return f"TrainingResult({str(self.path)!r}, step={self.step}, finished={self.finished})"

    def _repr_html_(self) -> str:
        from linnet.report.charts import Series, line_chart
        from linnet.report.metrics import curve

        records = self.metrics
        names = (("train", "training", "line"), ("eval", "validation", "dots"))
        found = [(name, kind, *curve(records, of, "loss")) for of, name, kind in names]
        series = [
            Series(name=name, x=x, y=y, colour=i + 1, kind="dots" if kind == "dots" else "line")
            for i, (name, kind, x, y) in enumerate(found)
            if x
        ]
        state = "finished" if self.finished else "interrupted"
        head = f"<p><code>{html.escape(str(self.path))}</code>: {state} at step {self.step:,}</p>"
        if not series:
            return head
        chart = line_chart(series, label="Loss by step", x_label="step", y_label="loss", width=560, height=280)
        return f"{head}{chart.standalone('Loss by step')}"


def train(
    config: str | os.PathLike[str] | RunConfig | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    from_run: str | os.PathLike[str] | None = None,
    checkpoint: str | int = "best",
    keep_optimizer: bool = False,
    on_step: OnStep | None = None,
    quiet: bool = False,
) -> TrainingResult:
    """Train a model. The same call resumes an interrupted run exactly where it stopped, and returns at once for a finished one.

    Args:
        config: A preset such as `"quickstart"`, a config.json (also one of DALLE2-pytorch's prior), a run folder to resume, or a
            `RunConfig`. Omit it with `from_run`.
        settings: Settings that replace those of `config`, by their dotted names: `{"optim.steps": 100, "data.source": "book.txt"}`.
            They are the flags of `linnet train`, whose `--help` describes them.
        out: Run folder. Default: runs/PRESET, or the folder of the run that is resumed; with `from_run`: runs/NAME-tuned.
        from_run: Fine-tune: start from the weights, tokenizer and model settings of a run, an import or an exported file.
        checkpoint: Checkpoint of `from_run`: `best`, `latest` or a step.
        keep_optimizer: Also load the optimizer state of `from_run`.
        on_step: Called after each step as `on_step(step, metrics)`, with scalar metrics such as `loss` and `grad_norm`.
        quiet: Show no progress.

    Returns:
        The run's folder, last step and metrics; its `load()` opens the model. Ctrl-C saves the run and returns with `finished` False.

    Raises:
        UserError: If a setting is unknown or invalid, or `out` holds another run.
    """
    given = dict(settings or {})
    if (config is None) == (from_run is None):
        raise UserError(
            "give either a config to train from random weights, or from_run to fine-tune. Fix: give one of them."
        )
    if on_step is not None and not callable(on_step):
        raise invalid("on_step", on_step, "a function of a step and its metrics", "leave it out")
    folder = None if out is None else Path(out)
    if from_run is not None:
        made, folder = _fine_tuning(Path(from_run), given, folder, str(checkpoint), keep_optimizer, quiet)
        return run_training(made, folder, quiet=quiet, on_step=on_step, may_exit=False)
    if keep_optimizer:
        raise invalid("keep_optimizer", True, "used with from_run, whose optimizer state it keeps", "add from_run")
    assert config is not None
    made, folder, remarks = _from_config(config, given, folder)
    return run_training(made, folder, remarks, quiet=quiet, on_step=on_step, may_exit=False)


def default_folder(name: str, preset: str) -> Path:
    """Return the output folder: a run is resumed in its own folder; anything else goes to runs/PRESET."""
    return Path(name) if (Path(name) / "config.json").is_file() else Path("runs") / preset


def run_training(
    config: RunConfig,
    out: Path,
    remarks: Sequence[str] = (),
    *,
    quiet: bool,
    on_step: OnStep | None = None,
    may_exit: bool = True,
) -> TrainingResult:
    """Train a run. `remarks` about its settings are printed and logged as events of the run."""
    from linnet.runs.environment import keep_memory

    if config.model.KEEPS_FREED_MEMORY:
        keep_memory()  # has no effect if JAX was imported before
    from linnet.parallel.cluster import init_jax
    from linnet.runs.folder import RunFolder
    from linnet.train.loop import train

    init_jax()
    if remarks:
        log_remarks(config, out, remarks)
    outcome = train(config, RunFolder(out), quiet=quiet, on_step=on_step, may_exit=may_exit)
    return TrainingResult(out, outcome.step, outcome.finished)


def log_remarks(config: RunConfig, out: Path, remarks: Sequence[str]) -> None:
    """Print and log the remarks. All checks that could reject the run come first, so that a run that cannot start writes nothing."""
    import sys

    from linnet.runs.folder import RunFolder
    from linnet.runs.metrics import MetricsLog
    from linnet.runs.trackers import require_trackers
    from linnet.train.initial_state import open_task
    from linnet.train.resume import check_resumable

    folder = RunFolder(out)
    require_trackers(config.train.trackers)
    check_resumable(config, folder, open_task(config).fingerprint)
    folder.create()
    with folder.lock(), MetricsLog(out) as log:
        for remark in remarks:
            print(remark, file=sys.stderr)
            log.write("event", 0, event="warning", message=remark)


# Configs of DALLE2-pytorch


def read_reference(path: Path) -> DallE2Config | None:
    """Read the config file, if it is one of DALLE2-pytorch."""
    if path.suffix != ".json" or not path.is_file():
        return None
    from linnet.convert.dalle2.schema import is_dalle2_config, parse_config, read_json

    values = read_json(path)
    return parse_config(values, path) if is_dalle2_config(values) else None


def open_reference(
    parts: DallE2Config, path: Path, config: RunConfig, out: Path | None
) -> tuple[RunConfig, Path, list[str]]:
    """Return the config to train with, its folder, and remarks. `config`: that of `run_config(parts)`, with all settings applied
    before the paths are opened, because they may correct them."""
    from linnet.convert.dalle2.config import default_run_folder
    from linnet.convert.dalle2.data import complete_config
    from linnet.convert.dalle2.tracker import find_loaded_file

    config, remarks = complete_config(parts, config)
    out, checkpoint = out or default_run_folder(parts, path), find_loaded_file(parts)
    if checkpoint is None:
        return config, out, list(remarks)
    config, loaded = _load_checkpoint(config, out, checkpoint)
    return config, out, [*remarks, *loaded]


def _load_checkpoint(config: RunConfig, out: Path, checkpoint: Path) -> tuple[RunConfig, list[str]]:
    """Start a new run from the checkpoint; an existing run resumes from its own."""
    import dataclasses

    from linnet.config import codec
    from linnet.convert.dalle2.importer import start_from_checkpoint
    from linnet.parallel.cluster import init_jax
    from linnet.runs.folder import RunFolder
    from linnet.train.exports import read_exports

    saved = RunFolder(out).config
    if saved.exists():
        existing = codec.load(saved)
        return dataclasses.replace(config, model=existing.model, optim=existing.optim), []
    init_jax()
    read_exports(config)
    return start_from_checkpoint(checkpoint, out, config)


# Settings


def _from_config(
    given: str | os.PathLike[str] | RunConfig, settings: Mapping[str, Any], out: Path | None
) -> tuple[RunConfig, Path, list[str]]:
    from linnet.config.resolve import base_config, with_settings
    from linnet.config.schema import RunConfig

    if isinstance(given, RunConfig):
        config = with_settings(given, settings)
        return config, out or Path("runs") / config.preset, []
    name = os.fspath(given)
    parts = read_reference(Path(name))
    if parts is not None:
        from linnet.convert.dalle2.config import run_config

        return open_reference(parts, Path(name), with_settings(run_config(parts), settings), out)
    base = base_config(name)
    config = _relocated(with_settings(base, settings), base)
    return config, out or default_folder(name, config.preset), []


def _fine_tuning(
    path: Path, settings: Mapping[str, Any], out: Path | None, checkpoint: str, keep_optimizer: bool, quiet: bool
) -> tuple[RunConfig, Path]:
    from linnet.config.resolve import flat_settings, with_settings
    from linnet.train import finetune

    out = out or finetune.default_out(path)
    started = finetune.started_config(out, path)
    given = dict(flat_settings(settings))
    base = started or finetune.new_config(
        path,
        checkpoint,
        steps=given["optim.steps"] if isinstance(given.get("optim.steps"), int) else None,
        lora=bool(given.get("lora.rank")),
        other_data=bool({"data.source", "data.images"} & given.keys()),
    )
    config = finetune.complete_config(
        _relocated(with_settings(base, settings), base),
        out,
        is_new=started is None,
        checkpoint=checkpoint,
        keep_optimizer=keep_optimizer,
        log=(lambda text: None) if quiet else print,
    )
    return config, out


def _relocated(config: RunConfig, base: RunConfig) -> RunConfig:
    """Make paths that the caller gave relative to the working directory."""
    from linnet.data.sources.locations import rebase_changed

    return rebase_changed(config, base)
