"""Generation of `report.html`: a self-contained page about a run, for desktop, phone and print.

It shows whatever the run folder contains; every file is optional. Everything read from files is escaped.
"""

from __future__ import annotations

import base64
import json
import re
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from linnet.core.formatting import duration
from linnet.evaluate import retrieval
from linnet.report import codebooks as report_codebooks
from linnet.report import experts as report_experts
from linnet.report import plots
from linnet.report import prior as report_prior
from linnet.report.page import card, clean, document, facts, half, none, section, table, two_widths, words
from linnet.report.plots import Record, finite
from linnet.report.svg import compact
from linnet.runs.metrics import read_metrics, replace_text

MAX_SAMPLES, SAMPLE_LETTERS, MAX_EVENTS, MAX_EVALS = 3, 4000, 100, 4
MAX_SHEETS, MAX_SHEET_BYTES = 8, 4 << 20
GOOD, WARN = {"finished"}, {"interrupted", "skipped", "alarm", "restart_codes", "failed", "stopped"}
ROUTINE = {"checkpoint"}
MARK = (
    '<svg class="mark chart" viewBox="0 0 48 48" aria-hidden="true"><rect class="f1" width="48" height="48" rx="12"/>'
    '<path fill="#fff" d="M8 17c5-1 8-5 14-5 8 0 13 6 13 13l6 9-10-3c-3 3-7 5-12 5-7 0-11-5-11-11 0-3 1-4 1-6z"/>'
    '<path class="s1" fill="none" stroke-width="2.6" stroke-linecap="round" d="M18 24c6-1 11 1 15 7"/>'
    '<circle class="f1" cx="17.5" cy="18.5" r="1.9"/></svg>'
)


def write_report(run: Path) -> Path:
    """Write `<run>/report.html` from the files in the run folder, and return its path."""
    page = run / "report.html"
    replace_text(page, render(run))
    return page


def render(run: Path) -> str:
    name, records = run.resolve().name, read_metrics(run)
    config = _read_object(run / "config.json")
    sections = [
        _header(name, config, records),
        _headlines(records, config),
        *(_of_prior(run, records) if _is_prior(config) else _of_tokens(run, records, config)),
        _events(records),
        _config(config),
        _environment(_read_object(run / "environment.json")),
    ]
    return document(f"{name} – Linnet report", [part for part in sections if part])


def _is_prior(config: dict[str, Any]) -> bool:
    return config.get("family") == "prior"


def _of_tokens(run: Path, records: Sequence[Record], config: dict[str, Any]) -> list[str]:
    compressors, quick_model = _compressors(_read_object(run / "quickstart.json"))
    return [
        _comparison(compressors, quick_model, records),
        _loss(records, compressors),
        _training(records),
        *_insides(records, config),
        _evaluations(run),
        _samples(run),
    ]


def _of_prior(run: Path, records: Sequence[Record]) -> list[str]:
    files = [_read_object(path) for path in sorted(run.glob("eval_*.json"))[:MAX_EVALS]]
    lead = "The pictures nearest to what it predicts for prompts, the newest first."
    return [*report_prior.sections(retrieval.read(run), records, files), _pictures(run, "Nearest pictures", lead)]


# Reading


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _compressors(quick: dict[str, Any]) -> tuple[list[tuple[str, float]], float | None]:
    found, model = quick.get("compressors"), quick.get("model")
    pairs = [(str(k), finite(v)) for k, v in found.items()] if isinstance(found, dict) else []
    levels = [(name, value) for name, value in pairs if value is not None and value > 0]
    return levels, finite(model.get("bits_per_byte")) if isinstance(model, dict) else None


def wall_seconds(records: Sequence[Record]) -> float:
    """Return the time the run was active, without the gaps before a start or a resume."""
    total, before = 0.0, None
    for record in records:
        now = finite(record.get("time"))
        if now is None:
            continue
        away = record["kind"] == "event" and record.get("event") in ("start", "resume")
        if before is not None and not away:
            total += max(0.0, now - before)
        before = now
    return total


# The sections


def _header(name: str, config: dict[str, Any], records: Sequence[Record]) -> str:
    told = [str(r.get("event")) for r in records if r["kind"] == "event" and str(r.get("event")) not in ROUTINE]
    last = told[-1] if told else ""
    status = (
        last if last in GOOD | {"interrupted", "failed", "stopped"} else "in progress" if records else "not started"
    )
    tone = "good" if status in GOOD else "warn" if status in WARN else ""
    about = [f"preset {config['preset']}"] if isinstance(config.get("preset"), str) else []
    about += [f"family {config['family']}"] if isinstance(config.get("family"), str) else []
    about += [date for r in records[:1] if (date := _date(r.get("time")))]
    return (
        f'<header>{MARK}<div class="name"><h1>{clean(name)}</h1><p class="sub">{escape(" · ".join(about))}</p></div>'
        f'<span class="badge {tone}">{escape(status)}</span></header>'
    )


def _date(seconds: Any) -> str | None:
    try:
        return f"{datetime.fromtimestamp(float(seconds), UTC):%-d %B %Y, %H:%M} UTC"
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _headlines(records: Sequence[Record], config: dict[str, Any]) -> str:
    if not records:
        return none("This run has no metrics yet.")
    step = max(int(r["step"]) for r in records)
    good, amount = report_prior.tiles(records) if _is_prior(config) else _token_tiles(records, config, step)
    total = sum(plots.setting(config, "optim", name) or 0.0 for name in ("steps", "extra_steps"))
    tiles = [*good, ("Steps", f"{step:,}", f"of {total:,.0f}" if total else ""), *amount]
    resumed = sum(r.get("event") == "resume" for r in records)
    tiles.append(
        (
            "Time at work",
            duration(wall_seconds(records)),
            f"resumed {'once' if resumed == 1 else f'{resumed} times'}" if resumed else "",
        )
    )
    memory = plots.curve(records, "train", "rss_bytes")[1]
    if memory:
        tiles.append(("Memory", f"{max(memory) / 1e9:.2f} GB", "largest seen"))
    body = "".join(
        f'<div class="tile{"" if i else " first"}"><dt>{escape(title)}</dt><dd><span class="big">{escape(value)}</span>'
        f'<span class="small">{escape(note)}</span></dd></div>'
        for i, (title, value, note) in enumerate(tiles)
    )
    return f'<dl class="tiles">{body}</dl>'


Tiles = list[tuple[str, str, str]]
"""Title, value and a note."""


def _token_tiles(records: Sequence[Record], config: dict[str, Any], step: int) -> tuple[Tiles, Tiles]:
    """Return the tiles about quality, and those about amount of training."""
    good: Tiles = []
    for name, title in (("bits_per_byte", "Bits per byte"), ("loss", "Nats per token")):
        steps, values = plots.curve(records, "eval", name)
        if values:
            best = min(range(len(values)), key=values.__getitem__)
            note = "its best" if values[best] == values[-1] else f"best {values[best]:.3f} at {steps[best]:,.0f}"
            good.append((title, f"{values[-1]:.3f}", f"validation; {note}"))
            break
    amount: Tiles = []
    batch, length = plots.setting(config, "data", "batch_size"), plots.setting(config, "data", "update_len")
    if batch and length:
        amount.append(("Tokens seen", compact(step * batch * length), f"{compact(batch * length)} a step"))
    speeds, shares = (plots.curve(records, "train", name)[1] for name in ("tokens_per_second", "mfu"))
    if speeds:
        use = f"{100 * statistics.median(shares):.0f}% of peak FLOP/s" if shares else "median"
        amount.append(("Tokens per second", compact(statistics.median(speeds)), use))
    return good, amount


def _comparison(compressors: list[tuple[str, float]], model: float | None, records: Sequence[Record]) -> str:
    values = plots.curve(records, "eval", "bits_per_byte")[1]
    ours = model if model is not None else values[-1] if values else None
    if not compressors or ours is None or ours <= 0:
        return ""
    beaten = [name for name, value in compressors if ours < value]
    missed = [name for name, value in compressors if ours >= value]
    verdict = f"The model needs fewer bits than {', '.join(beaten)}." if beaten else "No compressor is beaten yet."
    verdict += f" It still needs more than {', '.join(missed)}." if beaten and missed else ""
    chart = two_widths(lambda width, _: plots.compressor_figure(ours, compressors, width), 0)
    lead = f"Bits per byte of the same held-out text; shorter is better. {verdict}"
    return section("Against general compressors", card("", chart), lead=lead)


def _loss(records: Sequence[Record], compressors: list[tuple[str, float]]) -> str:
    chart = two_widths(lambda width, height: plots.loss_figure(records, compressors, width, height), 360)
    if not chart:
        return section("Loss", none("No losses recorded yet.")) if records else ""
    return section("Loss", card("", chart), lead="Training (thin: raw, thick: smoothed) and validation.")


def _training(records: Sequence[Record]) -> str:
    cards = "".join(card(title, half(draw)) for title, draw in plots.small_figures(records))
    return section("Training", f'<div class="pair">{cards}</div>') if cards else ""


def _insides(records: Sequence[Record], config: dict[str, Any]) -> list[str]:
    """Return the family-specific sections (codebooks, experts), or a note that the family's section has no data."""
    made = (report_codebooks, report_experts)
    found = [part for module in made if (part := module.section_of(records, config))]
    expected = report_experts if config.get("family") == "moe" else report_codebooks
    return found or ([expected.NOTHING] if records else [])


def _evaluations(run: Path) -> str:
    files = sorted(run.glob("eval_*.json"))[:MAX_EVALS]
    results = [(str(data.get("split") or path.stem), data) for path in files if (data := _read_object(path))]
    if not results:
        return ""

    def cell(value: Any, form: str) -> str:
        number = finite(value)
        return "–" if number is None else format(number, form)

    kinds = (("bits_per_byte", ".4f"), ("loss", ".4f"), ("perplexity", ".3f"), ("tokens", ",.0f"))
    body = [[escape(split), *(cell(data.get(name), form) for name, form in kinds)] for split, data in results]
    head = ["split", "bits per byte", "nats per token", "perplexity", "tokens"]
    parts = [f'<div class="card">{table(head, body, range(1, 5))}</div>']
    for split, data in results:
        by = data.get("per_position")
        if not isinstance(by, dict):
            continue
        edges, losses = by.get("edges"), by.get("loss")
        if not isinstance(edges, list) or not isinstance(losses, list):
            continue
        chart = two_widths(lambda width, height, e=edges, v=losses: plots.position_chart(e, v, width, height), 300)
        if chart:
            # In an image, position also determines content, so it does not isolate the effect of context.
            words = "" if "bits_per_dim" in data else plots.position_words(by)
            verdict = f'<p class="lead" style="margin:0 0 10px">{escape(words)}</p>' if words else ""
            parts.append(card(f"Loss by position, {split}", verdict + chart))
    return section("Evaluation", *parts)


def _newest(folder: Path, pattern: str) -> list[Path]:
    def order(path: Path) -> tuple[list[int], str]:
        return [int(n) for n in re.findall(r"\d{1,18}", path.stem)], path.name

    return sorted(filter(Path.is_file, folder.glob(pattern)), key=order, reverse=True)


def _pictures(run: Path, title: str, lead: str) -> str:
    """Return a section with the latest `linnet sample` sheet and the sheets from training, newest first."""
    files = _newest(run / "samples", "*.png")
    shown = [*_newest(run / "samples" / "pictures", "sheet.png"), *files[:MAX_SHEETS]]
    if not shown:
        return ""
    parts: list[str] = []
    for path in shown:
        content = path.read_bytes()
        if len(content) > MAX_SHEET_BYTES or not content.startswith(b"\x89PNG"):
            continue
        name = "linnet sample" if path.name == "sheet.png" else path.stem
        image = f'<img alt="{clean(name)}" src="data:image/png;base64,{base64.b64encode(content).decode()}">'
        parts.append(f"<details open><summary>{clean(name)}</summary>{image}</details>")
    if not parts:
        return ""
    return section(title, f'<div class="card">{"".join(parts)}</div>', lead=lead)


def _samples(run: Path) -> str:
    pictures = _pictures(run, "Pictures", "What the model paints, with the same seeds at every step; the newest first.")
    files = _newest(run / "samples", "*.txt")
    if not files:
        return pictures or section("Samples", none("No samples written yet."))
    parts: list[str] = []
    for i, path in enumerate(files[:MAX_SAMPLES]):
        with path.open("rb") as file:
            whole = file.read(4 * SAMPLE_LETTERS).decode("utf-8", errors="replace")
        short = whole[:SAMPLE_LETTERS] + (" …" if len(whole) > SAMPLE_LETTERS else "")
        opened = "" if i else " open"
        parts.append(f"<details{opened}><summary>{clean(path.stem)}</summary><pre>{clean(short)}</pre></details>")
    lead = f"What the model writes; the newest {len(parts)} of {len(files)}."
    return section("Samples", f'<div class="card">{"".join(parts)}</div>', lead=lead)


def _events(records: Sequence[Record]) -> str:
    events = [r for r in records if r["kind"] == "event"]
    told = [r for r in events if str(r.get("event")) not in ROUTINE]
    if not told:
        return ""
    begin = next((t for r in records if (t := finite(r.get("time"))) is not None), 0.0)
    body: list[list[str]] = []
    for record in told[-MAX_EVENTS:]:
        name, at = str(record.get("event")), finite(record.get("time"))
        tone = " good" if name in GOOD else " warn" if name in WARN else ""
        when = "–" if at is None else f"+{duration(at - begin)}"
        tag = f'<span class="tag{tone}">{clean(name.replace("_", " "))}</span>'
        body.append([escape(when), f"{record['step']:,}", tag, clean(str(record.get("message") or ""))])
    notes = [f"Checkpoints saved: {len(events) - len(told):,}."] if len(events) > len(told) else []
    if len(told) > MAX_EVENTS:
        notes.append(f"The last {MAX_EVENTS} of {len(told):,} events; metrics.jsonl has all.")
    grid = table(["time", "step", "event", ""], body, [1])
    return section("Events", f'<div class="card">{grid}</div>', lead=" ".join(notes))


def _config(config: dict[str, Any]) -> str:
    if not config:
        return section("Config", none("No config.json in this run."))
    plain = [(name, value) for name, value in config.items() if not isinstance(value, dict)]
    groups = [("run", plain), *((name, list(v.items())) for name, v in config.items() if isinstance(v, dict))]
    parts = [
        f"<details><summary>{escape(name)}<span>{len(pairs)} settings</span></summary>{facts(pairs)}</details>"
        for name, pairs in groups
        if pairs
    ]
    return section("Config", f'<div class="card">{"".join(parts)}</div>', lead="All that repeats this run.")


def _environment(environment: dict[str, Any]) -> str:
    if not environment:
        return ""
    pairs: list[tuple[str, Any]] = []
    for name, value in environment.items():
        title, amount = name.replace("_", " "), finite(value)
        if isinstance(value, dict):
            pairs.append((title, ", ".join(f"{k} {words(v)}" for k, v in value.items())))
        elif name.endswith("_bytes") and amount is not None:
            pairs.append((title.removesuffix(" bytes"), f"{amount / 1e9:.1f} GB"))
        else:
            pairs.append((title, value))
    return section("Environment", f'<div class="card">{facts(pairs)}</div>')
