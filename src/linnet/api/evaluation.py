"""`Run.evaluate` and its result, which `linnet eval` prints and writes into the run's folder."""

from __future__ import annotations

import functools
import html
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnet.core.dtypes import WeightDtype
from linnet.core.errors import UserError, invalid

if TYPE_CHECKING:
    from linnet.evaluate.language_model import Evaluation
    from linnet.evaluate.run import EvalSettings, PriorRunEvaluation
    from linnet.runs.load import LoadedRun


class EvaluationResult:
    """The figures of an evaluation."""

    def __init__(self, path: Path, metrics: dict[str, Any], details: Evaluation | PriorRunEvaluation) -> None:
        self._path = path
        self.metrics = metrics
        """All figures by name, as `linnet eval --json` prints them."""
        self.details = details

    @property
    def split(self) -> str:
        return self.metrics["split"]

    @property
    def loss(self) -> float:
        """Mean loss: nats per token of a language model, the diffusion loss of a prior."""
        return self.metrics["loss"]

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text (of images: per dimension). Raises for a prior, which predicts no bytes."""
        if "bits_per_byte" not in self.metrics:
            raise invalid("bits_per_byte", "of a prior", "of a language model", "use loss, or metrics")
        return self.metrics["bits_per_byte"]

    def __repr__(self) -> str:
        bits = self.metrics.get("bits_per_byte")
        more = "" if bits is None else f", {bits:.4f} bits per byte"
        return f"EvaluationResult({self.split!r}, loss {self.loss:.4f}{more})"

    def _repr_html_(self) -> str:
        shown = {
            name: f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
            for name, value in self.metrics.items()
            if isinstance(value, int | float | str) and name not in ("run", "peak_rss_bytes")
        }
        rows = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in shown.items())
        return f"<table>{''.join(rows)}</table>{self._figure() or ''}"

    def save(self) -> Path:
        """Write the figures as `eval_SPLIT.json` into the run's folder, where `linnet report` finds them, and return the path of the
        plot by position (of a prior: of the JSON file)."""
        from linnet.evaluate import retrieval
        from linnet.evaluate.run import PriorRunEvaluation
        from linnet.runs.metrics import replace_text

        if self._path.is_file():
            raise UserError(f"{self._path} is an exported file, not a run folder. Fix: use `metrics`.")
        details, weights = self.details, self.metrics.get("weights", "float32")
        name = self.split if weights == "float32" else f"{self.split}_{weights}"
        path = self._path / f"eval_{name}.json"
        if isinstance(details, PriorRunEvaluation):
            if details.rows and details.is_complete:
                n_steps = next(iter(details.result.predicted))
                retrieval.write(self._path, details.rows, details.matrix, self.split, self.metrics["step"], n_steps)
            replace_text(path, json.dumps(self.metrics, indent=2, allow_nan=False) + "\n")
            return path
        replace_text(path, json.dumps(self.metrics, indent=2) + "\n")
        figure = path.with_suffix(".svg")
        replace_text(figure, self._figure() or "")
        return figure

    def _figure(self) -> str | None:
        """The loss by position as SVG."""
        from linnet.evaluate.language_model import Evaluation
        from linnet.report.positions import position_svg

        if not isinstance(self.details, Evaluation):
            return None
        return position_svg(self.details.by_position.edges, self.details.by_position.nats)


def evaluate_run(
    run: LoadedRun, settings: EvalSettings, weights: WeightDtype, cast_to: WeightDtype | None, quiet: bool
) -> EvaluationResult:
    from linnet.evaluate.run import evaluate_language_model_run, evaluate_prior_run
    from linnet.train.progress import track

    settings.check_fit(run.cfg)
    progress = functools.partial(track, quiet=quiet)
    if run.cfg.reads_tokens:
        result, record = evaluate_language_model_run(run, settings, progress, weights, cast_to)
        return EvaluationResult(run.folder, record, result)
    if cast_to is not None:
        raise invalid("weights", cast_to, "left out for a prior", "leave it out")
    evaluation = evaluate_prior_run(run, settings, progress)
    return EvaluationResult(run.folder, evaluation.record, evaluation)
