"""The report's sections on a prior: losses of online and EMA weights, the five cosines, retrieval compared with three baselines, and
the similarity of captions and predicted images."""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence

from linnet.evaluate import retrieval
from linnet.evaluate.retrieval import Retrieval, Row, SimilarityMatrix
from linnet.report import figures
from linnet.report.charts import Series, line_chart
from linnet.report.figures import best_tile, loss_figure, throughput_tile, training_section
from linnet.report.heat_maps import matrix_chart
from linnet.report.metrics import Record, RunData, finite
from linnet.report.page import (
    Cell,
    Figure,
    Notice,
    Section,
    Table,
    Tile,
    columns,
    figure,
    format_cell,
    half_figure,
    section,
)
from linnet.report.samples import image_section
from linnet.report.svg import compact

MAX_COUNTS = 6  # step counts drawn: there are six colours

GOOD_VALUES = {
    "baseline similarity": "Caption and true image. A property of the data, and the reference for the other cosines.",
    "similarity with text": "Caption and the image predicted for it. Should be close to the baseline similarity (dashed); far above "
    "it, the prior repeats the text embedding instead of predicting an image embedding.",
    "similarity with original image": "Predicted and true image. Should be as high as possible, and above all three baselines.",
    "similarity with unrelated caption": "Caption and the image predicted for another caption. Should be far below the similarity "
    "with text.",
    "difference from baseline similarity": "Similarity with text minus baseline similarity. Should be close to 0.",
}
"""The five metrics by the reference's names, with a description of good values."""

NAMES = {
    retrieval.PRIOR: "this prior",
    retrieval.BEST: f"this prior, best of {retrieval.N_CANDIDATES} candidates ({retrieval.CANDIDATE_STEPS} steps of DPM-Solver++)",
    "text": "the text embedding itself",
    "mean": "the mean image embedding",
    "ridge": "ridge regression",
}

SCALARS = (
    figures.LEARNING_RATE,
    figures.GRADIENT_NORM,
    ("Throughput", "tracking/samples-sec", 1.0, "samples per second", 3, False),
    ("EMA decay", "tracking/ema-decay", 1.0, "", 2, False),
    figures.MEMORY,
    figures.DATA_WAIT,
)

_COSINE = re.compile(r"metrics/(?:online|ema)-[a-z]+/(.+) \[steps=(\d{1,6})\]")
_LOSS = re.compile(r"metrics/(online|ema)-[a-z]+/[a-z0-9]+-loss")

Cosines = dict[int, dict[str, float]]
"""The cosine metrics by number of denoising steps, then by name."""


def tiles(run: RunData, step: int) -> tuple[list[Tile | None], list[Tile | None]]:
    """Return the tiles about quality, and those about the amount of training."""
    quality = [best_tile("Loss", run.curve("eval", "loss"), 4)]
    measured = [r for r in run.records if r.get("kind") in ("eval", "test") and cosines_of(r)]
    if measured:  # the final test's, if there was one
        n_step, cosines = list(cosines_of(measured[-1]).items())[-1]
        value = cosines.get("similarity with original image")
        if value is not None:
            note = f"{_split(measured[-1])}; {n_step:,} steps"
            quality.append(Tile("Cosine with the image", f"{value:.3f}", note))
    seen, epochs = (run.curve("train", f"tracking/{name}")[1] for name in ("samples-seen", "epoch"))
    pairs = Tile("Pairs seen", compact(seen[-1]), f"epoch {epochs[-1]:,.0f}" if epochs else "") if seen else None
    return quality, [pairs, throughput_tile("Pairs per second", run, "tracking/samples-sec")]


def sections(run: RunData) -> list[Section | None]:
    table = retrieval.read(run.folder)
    return [
        _loss(run),
        _cosines(run),
        None if table is None else _retrieval(table),
        None if table is None or table.matrix is None else _similarity(table, table.matrix),
        training_section(run, SCALARS),
        image_section(
            run.folder, "Nearest images", "The images nearest to the predicted embeddings of prompts, newest first."
        ),
    ]


# Metrics of a record


def cosines_of(record: Record) -> Cosines:
    """Return the cosine metrics of a record."""
    cosines: Cosines = {}
    for key, value in record.items():
        match, number = _COSINE.fullmatch(key), finite(value)
        if match is not None and match[1] in GOOD_VALUES and number is not None:
            cosines.setdefault(int(match[2]), {})[match[1]] = number
    return dict(sorted(cosines.items()))


def losses_of(record: Record) -> dict[str, float]:
    """Return the losses of a record by set of weights: `online`, `ema`."""
    losses = ((_LOSS.fullmatch(key), finite(value)) for key, value in record.items())
    return {match[1]: value for match, value in losses if match is not None and value is not None}


def _split(record: Record) -> str:
    return str(record.get("split") or record.get("kind"))


def _validations(run: RunData) -> list[tuple[float, Record]]:
    """Return the validations by step."""
    records = sorted((r for r in run.records if r.get("kind") == "eval"), key=lambda r: r["step"])
    return [(step, r) for r in records if (step := finite(r["step"])) is not None]


def _series(name: str, points: Sequence[tuple[float, float]], colour: int) -> Series:
    xs, ys = zip(*points, strict=True)
    return Series(name=name, x=xs, y=ys, colour=colour, kind="dots")


# The sections


def _loss(run: RunData) -> Section | None:
    if not run.records:
        return None
    validation: list[Series] = []
    for colour, (weights, name) in enumerate((("online", "validation, online"), ("ema", "validation, EMA")), 2):
        points = [(step, v) for step, r in _validations(run) if (v := losses_of(r).get(weights)) is not None]
        validation += [_series(name, points, colour)] if points else []
    shown = loss_figure(run, "loss", "loss", validation, height=340, y_text=lambda v: f"{v:.4f}")
    if shown is None:
        return section("Loss", Notice("No losses recorded yet."))
    lead = (
        "Diffusion loss at random timesteps and noise. Training drops the conditioning with some probability, validation never does. "
        "Validation uses the trained weights (online) and, if enabled, their moving average (EMA), which is then also used to sample."
    )
    return section("Loss", shown, lead=lead)


def _cosines(run: RunData) -> Section | None:
    measured = [(step, cosines_of(r)) for step, r in _validations(run)]
    shown = columns(_over_time(measured, name, text) for name, text in GOOD_VALUES.items())
    table = _table(run)
    if shown is None and table is None:
        return None
    lead = (
        "Cosine similarities of embeddings, averaged over held-out pairs, for each number of denoising steps evaluated."
    )
    return section("Five cosines", table, shown, lead=lead)


def _over_time(measured: Sequence[tuple[float, Cosines]], name: str, text: str) -> Figure | None:
    counts = sorted({n for _, cosines in measured for n, values in cosines.items() if name in values})[:MAX_COUNTS]
    series = [
        _series(
            f"{n:,} steps", [(at, cosines[n][name]) for at, cosines in measured if name in cosines.get(n, {})], colour
        )
        for colour, n in enumerate(counts, 1)
    ]
    if not series:
        return None
    draw = functools.partial(
        line_chart, series, label=f"{name} over steps of training", x_label="step", y_label="cosine", levels=_level(measured, name),
        y_text=lambda v: f"{v:.3f}",
    )  # fmt: skip
    return half_figure(name[0].upper() + name[1:], draw, text=text)


def _level(measured: Sequence[tuple[float, Cosines]], name: str) -> list[tuple[str, float]]:
    """Return the reference level that a metric should be close to, if it has one."""
    if name == "difference from baseline similarity":
        return [("goal", 0.0)]
    if name != "similarity with text":
        return []
    reference = "baseline similarity"
    known = [values[reference] for _, cosines in measured for values in cosines.values() if reference in values]
    return [(reference, known[-1])] if known else []


def _table(run: RunData) -> Table | None:
    """Return a table of the last evaluation of each split and those by `linnet eval`, one row per number of steps."""
    last = {_split(r): r for r in run.records if r.get("kind") in ("eval", "test")}
    files = [(f"{r.get('split')}, by linnet eval", r) for _, r in run.evaluations() if type(r.get("step")) is int]
    rows: list[list[str]] = []
    for split, record in [*last.items(), *files]:
        losses = losses_of(record)
        for n, cosines in (cosines_of(record) or ({0: {}} if losses else {})).items():
            values = [*(losses.get(weights) for weights in ("online", "ema")), *map(cosines.get, GOOD_VALUES)]
            steps = f"{n:,}" if n else format_cell(None, "")
            rows.append([split, f"{record['step']:,}", steps, *(format_cell(value, ".4f") for value in values)])
    head = ["split", "step", "sampling steps", "loss, online", "loss, EMA"]
    head += ["baseline", "with text", "with image", "unrelated", "difference"]
    return Table(head, rows, range(1, len(head))) if rows else None


def _retrieval(table: Retrieval) -> Section:
    rows = [
        [
            Cell(_name(row), "ours") if row.name == retrieval.PRIOR else _name(row),
            *(
                format_cell(value if math.isfinite(value) else None, ".4f")
                for value in (row.cosine, row.recall_1, row.recall_10)
            ),
        ]
        for row in table.rows
    ]
    n = max(row.n for row in table.rows)
    head = ["predicted by", "cosine with the true image", "recall@1", "recall@10"]
    lead = (
        f"{n:,} pairs of the {table.split} split, weights of step {table.step:,}, {table.n_steps:,} denoising steps. Recall@k is how "
        f"often the true image is among the k nearest to the predicted one, of all {n:,}. {verdict(table.rows)}"
    )
    return section("Retrieval compared with three baselines", Table(head, rows, range(1, 4)), lead=lead)


def _name(row: Row) -> str:
    return NAMES.get(row.name, row.name)


def verdict(rows: Iterable[Row]) -> str:
    """Return one sentence on which baselines the prior beats, and in which metrics."""
    by_name = {row.name: row for row in rows}
    single, best = by_name.pop(retrieval.PRIOR, None), by_name.pop(retrieval.BEST, None)
    ours, who = (single, "The prior") if best is None else (best, "The best of the prior's candidates")
    if ours is None or not by_name:
        return ""
    metrics: tuple[tuple[str, Callable[[Row], float]], ...] = (
        ("cosine", lambda row: row.cosine),
        ("recall@1", lambda row: row.recall_1),
        ("recall@10", lambda row: row.recall_10),
    )
    lost = [(metric, [_name(row) for row in by_name.values() if not of(ours) > of(row)]) for metric, of in metrics]
    behind = [f"{', '.join(names)} in {metric}" for metric, names in lost if names]
    if behind:
        return f"{who} does not beat {'; '.join(behind)}."
    return f"{who} beats every baseline, in cosine and in retrieval."


def _similarity(table: Retrieval, matrix: SimilarityMatrix) -> Section:
    captions = [clean_line(caption) for caption in matrix.captions]
    draw = functools.partial(
        matrix_chart, captions, matrix.cosines, label="Cosine of each caption with the image predicted for each caption",
        row_label="caption" if matrix.by == "text" else "true image", column_label="predicted image",
    )  # fmt: skip
    who = "each caption" if matrix.by == "text" else "the true image of each caption"
    lead = (
        f"Cosine of {who} (rows) with the image predicted for each caption (columns), {table.split} split. "
        f"{describe_diagonal(matrix)}"
    )
    return section("Similarity of captions and predicted images", figure("", draw), lead=lead)


def clean_line(caption: str) -> str:
    """Replace unprintable characters by spaces. The chart escapes the result."""
    return "".join(letter if letter.isprintable() else " " for letter in caption)


def describe_diagonal(matrix: SimilarityMatrix) -> str:
    """Return a sentence that compares the diagonal with the other entries."""
    n, rows = len(matrix.captions), matrix.cosines
    own = [rows[i][i] for i in range(n) if math.isfinite(rows[i][i])]
    others = [rows[i][j] for i in range(n) for j in range(n) if i != j and math.isfinite(rows[i][j])]
    if not own or not others:
        return "A good prior's diagonal stands out."
    first = sum(
        all(not rows[i][j] >= rows[i][i] for j in range(n) if j != i) and math.isfinite(rows[i][i]) for i in range(n)
    )
    return (
        f"A good prior's diagonal stands out: here its mean is {statistics.fmean(own):.3f}, the mean of the other entries is "
        f"{statistics.fmean(others):.3f}, and {first} of {n} rows have their maximum on the diagonal."
    )
