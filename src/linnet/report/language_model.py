"""The report's sections on a language model: loss, compressors, codebooks, experts, evaluations and samples."""

from __future__ import annotations

import functools
from typing import Any

from linnet.report import codebooks, experts, figures
from linnet.report.charts import Series, row_chart
from linnet.report.figures import best_tile, decimals, loss_figure, throughput_tile, training_section
from linnet.report.metrics import RunData, finite, read_object
from linnet.report.page import Notice, Section, Table, Tile, figure, format_cell, section
from linnet.report.positions import position_figure
from linnet.report.samples import sample_section
from linnet.report.svg import compact

NOTHING_MEASURED = {"codebooks": codebooks.NOTHING, "experts": experts.NOTHING}
"""The notes in place of sections for which nothing was recorded, by `ModelConfig.REPORT_SECTIONS`."""

SCALARS = (
    figures.LEARNING_RATE,
    figures.GRADIENT_NORM,
    ("Throughput", "tokens_per_second", 1.0, "tokens per second", 3, False),
    figures.MEMORY,
    ("Commitment loss", "loss_commit", 1.0, "squared distance of keys to codes", 2, True),
    figures.DATA_WAIT,
)


def tiles(run: RunData, step: int) -> tuple[list[Tile | None], list[Tile | None]]:
    """Return the tiles about quality, and those about the amount of training."""
    bits = best_tile("Bits per byte", run.curve("eval", "bits_per_byte"), 3)
    quality = bits or best_tile("Nats per token", run.curve("eval", "loss"), 3)
    batch, length = run.setting("data", "batch_size"), run.setting("data", "update_len")
    seen = None
    if batch and length:
        seen = Tile("Tokens seen", compact(step * batch * length), f"{compact(batch * length)} per step")
    return [quality], [seen, throughput_tile("Tokens per second", run, "tokens_per_second")]


def sections(run: RunData) -> list[Section | None]:
    compressors, model = _compressors(read_object(run.folder / "quickstart.json"))
    return [
        _comparison(run, compressors, model),
        _loss(run, compressors),
        training_section(run, SCALARS),
        *_diagnostics(run),
        _evaluations(run),
        sample_section(run.folder),
    ]


def _compressors(quick: dict[str, Any]) -> tuple[list[tuple[str, float]], float | None]:
    sizes, model = quick.get("compressors"), quick.get("model")
    pairs = [(str(k), finite(v)) for k, v in sizes.items()] if isinstance(sizes, dict) else []
    levels = [(name, value) for name, value in pairs if value is not None and value > 0]
    return levels, finite(model.get("bits_per_byte")) if isinstance(model, dict) else None


def _comparison(run: RunData, compressors: list[tuple[str, float]], model: float | None) -> Section | None:
    values = run.curve("eval", "bits_per_byte")[1]
    ours = model if model is not None else values[-1] if values else None
    if not compressors or ours is None or ours <= 0:
        return None
    better = ", ".join(name for name, value in compressors if ours < value)
    worse = ", ".join(name for name, value in compressors if ours >= value)
    verdict = f"The model needs fewer bits than {better}." if better else "The model does not beat any compressor yet."
    verdict += f" It still needs more than {worse}." if better and worse else ""
    others = ((name, value, 6) for name, value in sorted(compressors, key=lambda pair: -pair[1]))
    label = "Bits per byte of this model and of compressors"
    draw = functools.partial(row_chart, [("this model", ours, 1), *others], label=label, y_text=decimals)
    lead = f"Bits per byte on the same held-out text; lower is better. {verdict}"
    return section("Compared with general-purpose compressors", figure("", draw), lead=lead)


def _loss(run: RunData, compressors: list[tuple[str, float]]) -> Section | None:
    if not run.records:
        return None
    has_bits = any(finite(r.get("bits_per_byte")) is not None for r in run.records)
    name, unit = ("bits_per_byte", "bits per byte") if has_bits else ("loss", "nats per token")
    x, y = run.curve("eval", name)
    validation = [Series(name="validation", x=x, y=y, colour=2, kind="dots")] if x else []
    shown = loss_figure(run, name, unit, validation, height=360, levels=compressors if has_bits else ())
    if shown is None:
        return section("Loss", Notice("No losses recorded yet."))
    return section("Loss", shown, lead="Training loss (thin: raw, thick: smoothed) and validation loss.")


def _diagnostics(run: RunData) -> list[Section | None]:
    """Return the sections on codebooks and experts, or a note that the one of the run's family has no data."""
    measured = [codebooks.codebook_section(run), experts.expert_section(run)]
    if any(measured) or not run.records:
        return measured
    return [NOTHING_MEASURED[name] for name in run.model.REPORT_SECTIONS]


def _evaluations(run: RunData) -> Section | None:
    results = [(str(data.get("split") or name), data) for name, data in run.evaluations()]
    if not results:
        return None
    metrics = (("bits_per_byte", ".4f"), ("loss", ".4f"), ("perplexity", ".3f"), ("tokens", ",.0f"))
    rows = [[split, *(format_cell(finite(data.get(name)), form) for name, form in metrics)] for split, data in results]
    head = ["split", "bits per byte", "nats per token", "perplexity", "tokens"]
    by_position = (position_figure(split, data) for split, data in results)
    return section("Evaluation", Table(head, rows, range(1, 5)), *by_position)
