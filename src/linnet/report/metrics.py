"""The data of a report: the files of a run folder, any of which may be missing or damaged."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linnet.models import registry
from linnet.models.model_config import ModelConfig
from linnet.runs.metrics import read_metrics

Record = dict[str, Any]

MAX_PARTS = 512
MAX_EVALUATIONS = 4
MAX_PLOTTED, MIN_PLOTTED = 1e15, 1e-30  # plotted range: larger values come from damaged files, smaller ones become 0


@dataclasses.dataclass(frozen=True)
class RunData:
    folder: Path
    records: Sequence[Record]
    config: dict[str, Any]

    @property
    def model(self) -> type[ModelConfig]:
        """The config class of the run's family. Runs from before there were several families have no such field, and are `vq`."""
        name = self.config.get("family")
        return registry.config_class(name if name in registry.names() else "vq")

    def setting(self, *names: str) -> float | None:
        """Return a numeric setting of the run's config, or None."""
        value: Any = self.config
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return finite(value)

    def curve(self, kind: str, name: str, scale: float = 1.0) -> tuple[list[float], list[float]]:
        return curve(self.records, kind, name, scale)

    def evaluations(self) -> list[tuple[str, dict[str, Any]]]:
        """Return name and content of the files that `linnet eval` wrote."""
        files = sorted(self.folder.glob("eval_*.json"))[:MAX_EVALUATIONS]
        return [(path.stem, data) for path in files if (data := read_object(path))]


def load_run_data(run: Path) -> RunData:
    return RunData(run, read_metrics(run), read_object(run / "config.json"))


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def newest_files(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a folder, ordered by the numbers in their names, the greatest first."""

    def order(path: Path) -> tuple[list[int], str]:
        return [int(n) for n in re.findall(r"\d{1,18}", path.stem)], path.name

    return sorted(filter(Path.is_file, folder.glob(pattern)), key=order, reverse=True)


def finite(value: Any) -> float | None:
    """Return an untrusted value as a number that can be plotted, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_PLOTTED < value < MAX_PLOTTED:
        return None
    return float(value) if abs(value) > MIN_PLOTTED else 0.0


def curve(records: Sequence[Record], kind: str, name: str, scale: float = 1.0) -> tuple[list[float], list[float]]:
    """Return steps and values of one metric, ordered by step, without missing values."""
    points = ((finite(r.get("step")), finite(r.get(name))) for r in records if r.get("kind") == kind)
    pairs = sorted(((s, v * scale) for s, v in points if s is not None and v is not None), key=lambda pair: pair[0])
    return [s for s, _ in pairs], [v for _, v in pairs]


def per_part(record: Record, group: str, name: str) -> list[float | None]:
    """Return one diagnostic of the model, one value per part (unit or layer); empty if it is missing."""
    diagnostics = record.get(group)
    values = diagnostics.get(name) if isinstance(diagnostics, dict) else None
    return [finite(v) for v in values[:MAX_PARTS]] if isinstance(values, list) else []


def records_with(records: Sequence[Record], group: str) -> list[Record]:
    """Return the training records that contain a group of diagnostics, ordered by step."""
    return sorted(
        (r for r in records if r.get("kind") == "train" and isinstance(r.get(group), dict)), key=lambda r: r["step"]
    )


def wall_seconds(records: Sequence[Record]) -> float:
    """Return the time the run was active, without the gaps before a start or a resume."""
    total, before = 0.0, None
    for record in records:
        now = finite(record.get("time"))
        if now is None:
            continue
        paused = record["kind"] == "event" and record.get("event") in ("start", "resume")
        if before is not None and not paused:
            total += max(0.0, now - before)
        before = now
    return total
