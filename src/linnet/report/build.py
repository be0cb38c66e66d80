"""Generation of `report.html`: a self-contained page about a run, for desktop, phone and print.

It shows whatever the run folder contains; every file is optional. Texts from files are escaped by the templates.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from linnet.core.formatting import duration
from linnet.report import language_model, prior
from linnet.report.metrics import RunData, finite, load_run_data, read_object, wall_seconds
from linnet.report.page import (
    Cell,
    Facts,
    Fold,
    Folds,
    Notice,
    Page,
    Section,
    Table,
    Tile,
    format_cell,
    format_value,
    render_page,
    section,
    tone,
)
from linnet.runs.metrics import replace_text

MAX_EVENTS = 100
ROUTINE = {"checkpoint"}
FINAL = ("finished", "interrupted", "failed", "stopped")


def write_report(run: Path) -> Path:
    """Write `<run>/report.html` from the files in the run folder, and return its path."""
    page = run / "report.html"
    replace_text(page, render(run))
    return page


def render(folder: Path) -> str:
    run = load_run_data(folder)
    content = prior if run.model.READS == "pairs" else language_model
    sections = [*content.sections(run), _events(run), _config(run.config), _environment(folder)]
    return render_page(
        Page(
            name=folder.resolve().name,
            about=_about(run),
            status=_status(run),
            tiles=_tiles(run, content.tiles) if run.records else [],
            sections=[part for part in sections if part is not None],
        )
    )


def _events_of(run: RunData) -> list[dict[str, Any]]:
    return [r for r in run.records if r["kind"] == "event" and str(r.get("event")) not in ROUTINE]


def _status(run: RunData) -> str:
    last = str(events[-1].get("event")) if (events := _events_of(run)) else ""
    return last if last in FINAL else "in progress" if run.records else "not started"


def _about(run: RunData) -> list[str]:
    named = [f"{name} {value}" for name in ("preset", "family") if isinstance(value := run.config.get(name), str)]
    return named + [date for r in run.records[:1] if (date := _date(r.get("time")))]


def _date(seconds: Any) -> str | None:
    try:
        return f"{datetime.fromtimestamp(float(seconds), UTC):%-d %B %Y, %H:%M} UTC"
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _tiles(
    run: RunData, family_tiles: Callable[[RunData, int], tuple[list[Tile | None], list[Tile | None]]]
) -> list[Tile]:
    step = max(int(r["step"]) for r in run.records)
    quality, amount = family_tiles(run, step)
    total = sum(run.setting("optim", name) or 0.0 for name in ("steps", "extra_steps"))
    resumed = sum(r.get("event") == "resume" for r in run.records)
    times = "" if not resumed else "resumed once" if resumed == 1 else f"resumed {resumed} times"
    memory = run.curve("train", "rss_bytes")[1]
    tiles = [
        *quality,
        Tile("Steps", f"{step:,}", f"of {total:,.0f}" if total else ""),
        *amount,
        Tile("Training time", duration(wall_seconds(run.records)), times),
        Tile("Memory", f"{max(memory) / 1e9:.2f} GB", "peak") if memory else None,
    ]
    return [tile for tile in tiles if tile is not None]


def _events(run: RunData) -> Section | None:
    events = _events_of(run)
    if not events:
        return None
    begin = next((t for r in run.records if (t := finite(r.get("time"))) is not None), 0.0)
    rows: list[list[str | Cell]] = []
    for record in events[-MAX_EVENTS:]:
        name, at = str(record.get("event")), finite(record.get("time"))
        when = format_cell(None, "") if at is None else f"+{duration(at - begin)}"
        tag = Cell(name.replace("_", " "), f"tag {tone(name)}")
        rows.append([when, f"{record['step']:,}", tag, str(record.get("message") or "")])
    n_routine = sum(r["kind"] == "event" for r in run.records) - len(events)
    notes = [f"Checkpoints saved: {n_routine:,}."] if n_routine else []
    if len(events) > MAX_EVENTS:
        notes.append(f"The last {MAX_EVENTS} of {len(events):,} events; metrics.jsonl has all.")
    return section("Events", Table(["time", "step", "event", ""], rows, [1]), lead=" ".join(notes))


def _config(config: dict[str, Any]) -> Section:
    if not config:
        return section("Config", Notice("No config.json in this run."))
    plain = {name: value for name, value in config.items() if not isinstance(value, dict)}
    groups = [("run", plain), *((name, value) for name, value in config.items() if isinstance(value, dict))]
    folds = [
        Fold(name, note=f"{len(values)} settings", pairs=[(key, format_value(value)) for key, value in values.items()])
        for name, values in groups
        if values
    ]
    return section("Config", Folds(folds), lead="All settings needed to reproduce this run.")


def _environment(folder: Path) -> Section | None:
    environment = read_object(folder / "environment.json")
    pairs: list[tuple[str, str]] = []
    for name, value in environment.items():
        title, amount = name.replace("_", " "), finite(value)
        if isinstance(value, dict):
            pairs.append((title, ", ".join(f"{k} {format_value(v)}" for k, v in value.items())))
        elif name.endswith("_bytes") and amount is not None:
            pairs.append((title.removesuffix(" bytes"), f"{amount / 1e9:.1f} GB"))
        else:
            pairs.append((title, format_value(value)))
    return section("Environment", Facts(pairs)) if pairs else None
