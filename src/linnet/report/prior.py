"""The report's sections on a prior: losses of online and EMA weights, the five cosines, retrieval compared with three baselines, and
the similarity of captions and predicted images."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from linnet.evaluate import retrieval
from linnet.evaluate.retrieval import Retrieval, Row, SimilarityMatrix
from linnet.report import plots
from linnet.report.charts import Series, line_chart
from linnet.report.matrix_chart import matrix_chart
from linnet.report.page import card, clean, half, none, section, table, two_widths
from linnet.report.plots import Record, finite
from linnet.report.svg import compact

MAX_COUNTS = 6  # step counts drawn: there are six colours

GOOD_VALUES = {
    "baseline similarity": "The caption with its true image: what the data has. It stays as it is; the others are read against it.",
    "similarity with text": "The caption with the image predicted for it: near the baseline similarity (dashed). Far above it, the "
    "prior repeats the text instead of predicting an image.",
    "similarity with original image": "The predicted with the true image: as high as it gets, and above all three baselines.",
    "similarity with unrelated caption": "A caption with the image predicted for another: low, far below the similarity with text.",
    "difference from baseline similarity": "Similarity with text less the baseline similarity: near 0.",
}
"""The five metrics by the reference's names, with a description of good values."""

NAMES = {
    retrieval.PRIOR: "this prior",
    retrieval.BEST: f"this prior, the best of {retrieval.N_CANDIDATES} by {retrieval.CANDIDATE_STEPS} steps of DPM-Solver++",
    "text": "the text used as the image",
    "mean": "the mean image",
    "ridge": "ridge regression",
}

SCALARS = (
    ("Learning rate", "lr", 1.0, "", 4, False),
    ("Gradient norm", "grad_norm", 1.0, "global norm, before clipping", 5, True),
    ("Throughput", "tracking/samples-sec", 1.0, "samples per second", 3, False),
    ("EMA decay", "tracking/ema-decay", 1.0, "", 2, False),
    ("Memory", "rss_bytes", 1e-9, "GB resident", 1, False),
    ("Waiting for data", "wait_share", 100.0, "% of a step", 6, False),
)

_COSINE = re.compile(r"metrics/(?:online|ema)-[a-z]+/(.+) \[steps=(\d{1,6})\]")
_LOSS = re.compile(r"metrics/(online|ema)-[a-z]+/[a-z0-9]+-loss")


def sections(found: Retrieval | None, records: Sequence[Record], evaluations: Sequence[dict[str, Any]]) -> list[str]:
    """Return the sections of a prior's report. `evaluations`: files written by `linnet eval`."""
    return [
        _loss(records),
        _cosines(records, evaluations),
        "" if found is None else _retrieval(found),
        "" if found is None or found.matrix is None else _similarity(found, found.matrix),
        _training(records),
    ]


# Metrics of a record


def cosines_of(record: Record) -> dict[int, dict[str, float]]:
    """Return the cosine metrics of a record, by number of denoising steps, then by name."""
    found: dict[int, dict[str, float]] = {}
    for key, value in record.items():
        told, number = _COSINE.fullmatch(key), finite(value)
        if told is not None and told[1] in GOOD_VALUES and number is not None:
            found.setdefault(int(told[2]), {})[told[1]] = number
    return dict(sorted(found.items()))


def losses_of(record: Record) -> dict[str, float]:
    """Return the losses of a record by set of weights: `online`, `ema`."""
    found = ((_LOSS.fullmatch(key), finite(value)) for key, value in record.items())
    return {told[1]: value for told, value in found if told is not None and value is not None}


def tiles(records: Sequence[Record]) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Return tiles (title, value, note) for the top of the page: about quality, and about amount of training."""
    good: list[tuple[str, str, str]] = []
    steps, values = plots.curve(records, "eval", "loss")
    if values:
        best = min(range(len(values)), key=values.__getitem__)
        note = "its best" if values[best] == values[-1] else f"best {values[best]:.4f} at {steps[best]:,.0f}"
        good.append(("Loss", f"{values[-1]:.4f}", f"validation; {note}"))
    last = _latest(records)
    if last is not None:
        n_step, figures = list(cosines_of(last).items())[-1]
        value = figures.get("similarity with original image")
        if value is not None:
            good.append(("Cosine with the image", f"{value:.3f}", f"{_split(last)}; {n_step:,} steps"))
    amount: list[tuple[str, str, str]] = []
    seen = plots.curve(records, "train", "tracking/samples-seen")[1]
    if seen:
        epochs = plots.curve(records, "train", "tracking/epoch")[1]
        amount.append(("Pairs seen", compact(seen[-1]), f"epoch {epochs[-1]:,.0f}" if epochs else ""))
    speeds, shares = (plots.curve(records, "train", name)[1] for name in ("tracking/samples-sec", "mfu"))
    if speeds:
        use = f"{100 * statistics.median(shares):.0f}% of peak FLOP/s" if shares else "median"
        amount.append(("Pairs per second", compact(statistics.median(speeds)), use))
    return good, amount


def _latest(records: Sequence[Record]) -> Record | None:
    """Return the last record with cosines: the final test's if there was one."""
    judged = [r for r in records if r.get("kind") in ("eval", "test") and cosines_of(r)]
    return judged[-1] if judged else None


def _split(record: Record) -> str:
    return str(record.get("split") or record.get("kind"))


# The sections


def _loss(records: Sequence[Record]) -> str:
    x, y = plots.curve(records, "train", "loss")
    series: list[Series] = []
    if x:
        smoothed = plots.smooth(y, max(1, len(y) // 60))
        series += [Series(name="raw", x=x, y=y, kind="faint"), Series(name="training", x=x, y=smoothed)]
    judged = sorted((r for r in records if r.get("kind") == "eval"), key=lambda r: r["step"])
    for colour, (who, name) in enumerate((("online", "validation, online"), ("ema", "validation, EMA")), 2):
        points = [
            (at, v)
            for r in judged
            if (v := losses_of(r).get(who)) is not None and (at := finite(r["step"])) is not None
        ]
        if points:
            xs, ys = zip(*points, strict=True)
            series.append(Series(name=name, x=xs, y=ys, colour=colour, kind="dots"))
    if not series:
        return section("Loss", none("No losses recorded yet.")) if records else ""
    limit = plots.top([v for s in series if s.kind != "faint" for v in s.y])

    def draw(width: float, height: float) -> str:
        return line_chart(
            series, label="Training and validation loss over steps", x_label="step", y_label="loss", width=width, height=height,
            y_top=limit, y_text=lambda v: f"{v:.4f}", points=500,
        )  # fmt: skip

    lead = (
        "Of the diffusion, at times and noises drawn at random. Training drops conditions now and then, validation never. Validation "
        "is of the weights as trained (online) and, where one is kept, of their moving average (EMA), which then is what is sampled."
    )
    return section("Loss", card("", two_widths(draw, 340)), lead=lead)


def _cosines(records: Sequence[Record], evaluations: Sequence[dict[str, Any]]) -> str:
    judged = sorted((r for r in records if r.get("kind") == "eval"), key=lambda r: r["step"])
    told = [(at, cosines_of(r)) for r in judged if (at := finite(r["step"])) is not None]
    cards = [
        card(name[0].upper() + name[1:], f'<p class="lead" style="margin:0 0 10px">{escape(words)}</p>{half(draw)}')
        for name, words in GOOD_VALUES.items()
        if (draw := _over_time(told, name)) is not None
    ]
    grid = _all_figures(records, evaluations)
    if not cards and not grid:
        return ""
    lead = "Cosines of embeddings, the mean over held-out pairs, for each number of denoising steps that was tried."
    return section("Five cosines", grid, f'<div class="pair" style="margin-top:16px">{"".join(cards)}</div>', lead=lead)


def _over_time(told: Sequence[tuple[float, dict[int, dict[str, float]]]], name: str) -> plots.Draw | None:
    counts = sorted({n for _, figures in told for n, values in figures.items() if name in values})[:MAX_COUNTS]
    series: list[Series] = []
    for colour, n in enumerate(counts, 1):
        points = [(at, figures[n][name]) for at, figures in told if name in figures.get(n, {})]
        xs, ys = zip(*points, strict=True)
        series.append(Series(name=f"{n:,} steps", x=xs, y=ys, colour=colour, kind="dots"))
    if not series:
        return None
    level = _level(told, name)

    def draw(width: float, height: float) -> str:
        return line_chart(
            series, label=f"{name} over steps of training", x_label="step", y_label="cosine", width=width, height=height,
            levels=level, y_text=lambda v: f"{v:.3f}",
        )  # fmt: skip

    return draw


def _level(told: Sequence[tuple[float, dict[int, dict[str, float]]]], name: str) -> list[tuple[str, float]]:
    """Return the reference level that a metric should be close to, if it has one."""
    if name == "difference from baseline similarity":
        return [("goal", 0.0)]
    if name != "similarity with text":
        return []
    known = [
        values["baseline similarity"]
        for _, figures in told
        for values in figures.values()
        if "baseline similarity" in values
    ]
    return [("baseline similarity", known[-1])] if known else []


def _all_figures(records: Sequence[Record], evaluations: Sequence[dict[str, Any]]) -> str:
    """Return a table of the last evaluation of each split and those by `linnet eval`, one row per number of steps."""
    last = {_split(r): r for r in records if r.get("kind") in ("eval", "test")}
    shown = [
        *last.items(),
        *((f"{r.get('split')}, by linnet eval", r) for r in evaluations if type(r.get("step")) is int),
    ]
    body: list[list[str]] = []
    for split, record in shown:
        losses = losses_of(record)
        cosines = cosines_of(record) or ({0: {}} if losses else {})
        for n, figures in cosines.items():
            known = [_cell(losses.get(who), ".4f") for who in ("online", "ema")]
            known += [_cell(figures.get(name), ".4f") for name in GOOD_VALUES]
            body.append([clean(split), f"{record['step']:,}", f"{n:,}" if n else "–", *known])
    if not body:
        return ""
    head = [
        "split",
        "at",
        "steps",
        "loss, online",
        "loss, EMA",
        "baseline",
        "with text",
        "with image",
        "unrelated",
        "difference",
    ]
    return f'<div class="card">{table(head, body, range(1, len(head)))}</div>'


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None or not math.isfinite(value) else format(value, form)


def _retrieval(found: Retrieval) -> str:
    body = [
        [
            f"<b>{clean(_name(row))}</b>" if row.name == retrieval.PRIOR else clean(_name(row)),
            *(_cell(value, ".4f") for value in (row.cosine, row.recall_1, row.recall_10)),
        ]
        for row in found.rows
    ]
    n = max(row.n for row in found.rows)
    grid = table(["predicted by", "cosine with the true image", "recall@1", "recall@10"], body, range(1, 4))
    lead = (
        f"{n:,} pairs of the {found.split} split, the weights of step {found.step:,}, {found.n_steps:,} denoising steps. Recall: how "
        f"often the true image is among the 1 or 10 nearest to the predicted one, of all {n:,}. {verdict(found.rows)}"
    )
    return section("Retrieval beside three baselines", f'<div class="card">{grid}</div>', lead=lead)


def _name(row: Row) -> str:
    return NAMES.get(row.name, row.name)


def verdict(rows: Iterable[Row]) -> str:
    """Return one sentence on which baselines the prior beats, and in which metrics."""
    by_name = {row.name: row for row in rows}
    single, best = by_name.pop(retrieval.PRIOR, None), by_name.pop(retrieval.BEST, None)
    ours, who = (single, "The prior") if best is None else (best, "The best of the prior's candidates")
    if ours is None or not by_name:
        return ""
    kinds: tuple[tuple[str, Callable[[Row], float]], ...] = (
        ("cosine", lambda row: row.cosine),
        ("recall@1", lambda row: row.recall_1),
        ("recall@10", lambda row: row.recall_10),
    )
    lost = [(kind, [_name(row) for row in by_name.values() if not of(ours) > of(row)]) for kind, of in kinds]
    behind = [f"{', '.join(names)} in {kind}" for kind, names in lost if names]
    return (
        f"{who} does not beat {'; '.join(behind)}."
        if behind
        else f"{who} beats every baseline, in cosine and in retrieval."
    )


def _similarity(found: Retrieval, matrix: SimilarityMatrix) -> str:
    captions = [clean_line(caption) for caption in matrix.captions]

    def draw(width: float, _: float) -> str:
        return matrix_chart(
            captions, matrix.cosines, label="Cosine of each caption with the image predicted for each caption",
            row_label="caption" if matrix.by == "text" else "true image", column_label="predicted image", width=width,
        )  # fmt: skip

    who = "each caption" if matrix.by == "text" else "the true image of each caption"
    lead = f"The cosine of {who} (down) with the image predicted for each (across), {found.split} split. {diagonal_words(matrix)}"
    return section("Captions against predicted images", card("", two_widths(draw, 0)), lead=lead)


def clean_line(caption: str) -> str:
    """Replace unprintable characters by spaces. The chart escapes the result."""
    return "".join(letter if letter.isprintable() else " " for letter in caption)


def diagonal_words(matrix: SimilarityMatrix) -> str:
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
        f"A good prior's diagonal stands out: here its mean is {statistics.fmean(own):.3f}, that of the others "
        f"{statistics.fmean(others):.3f}, and {first} of {n} rows are greatest there."
    )


def _training(records: Sequence[Record]) -> str:
    cards = "".join(card(title, half(draw)) for title, draw in plots.small_figures(records, SCALARS))
    return section("Training", f'<div class="pair">{cards}</div>') if cards else ""
