"""The report: complete, self-contained, safe and light, whatever the run's folder holds."""

from __future__ import annotations

import getpass
import io
import json
import math
import mmap
import os
import re
import socket
import tempfile
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from linnet.config import codec
from linnet.config import schema as config
from linnet.evaluate.positions import PositionSums
from linnet.report import charts, figures, positions, svg, templates
from linnet.report.build import render, write_report
from linnet.report.metrics import wall_seconds
from linnet.runs import environment

EVIL = "<script>alert('x')</script>&\"'"
EDGES = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256]
LOSSES = [3.0, 2.5, 2.2, 2.0, 1.8, 1.6, 1.5, 1.4, 1.3]


class Checker(HTMLParser):
    """Every tag is closed where it should be; what would load or run something is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe", "object", "embed", "form", "base"):
            self.loads.append(tag)
        self.loads += [
            f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "xlink:href") or name.startswith("on")
        ]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def checked(page: str) -> str:
    """The words of a page that is well formed, loads nothing, and weighs less than a megabyte."""
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert checker.loads == []
    assert "url(" not in page
    assert "@import" not in page
    assert re.findall(r"https?://[^\"<\s]*", page.replace("http://www.w3.org/2000/svg", "")) == []
    assert len(page.encode()) < 1_000_000
    for number in re.findall(r'(?:\b(?:x|y|cx|cy|d|width|height)|viewBox)="([^"]*)"', page):
        assert "nan" not in number
        assert "inf" not in number
    return " ".join(checker.texts)


def train_line(step: int, units: int = 4) -> dict[str, Any]:
    loss = 1.2 + 3 * math.exp(-step / 50)
    book = {
        "entropy": [4.0 - 0.1 * u for u in range(units)],
        "perplexity": [50.0 - u for u in range(units)],
        "usage": [0.9] * units,
        "dead": list(range(units)),
        "relative_err": [0.4] * units,
    }
    return {
        "kind": "train", "step": step, "time": 1e9 + step, "loss": loss, "bits_per_byte": loss / math.log(2), "lr": 1e-4,
        "grad_norm": 0.5, "tokens_per_second": 1000.0, "mfu": 0.4, "rss_bytes": 900_000_000, "codebook": book,
    }  # fmt: skip


def eval_line(step: int, bits: float) -> dict[str, Any]:
    return {
        "kind": "eval",
        "step": step,
        "time": 1e9 + step,
        "split": "validation",
        "loss": bits,
        "bits_per_byte": bits,
    }


def event(step: int, name: str, message: str = "", time: float | None = None) -> dict[str, Any]:
    return {
        "kind": "event",
        "step": step,
        "time": 1e9 + step if time is None else time,
        "event": name,
        "message": message,
    }


def write_lines(run: Path, *records: Any) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


@pytest.fixture
def full_run(tmp_path: Path) -> Path:
    run = tmp_path / "my-run"
    (run / "samples").mkdir(parents=True)
    codec.save(config.RunConfig(preset="quickstart"), run / "config.json")
    lines = [
        event(0, "start", "fresh"),
        *(train_line(s) for s in range(5, 405, 5)),
        eval_line(200, 1.9),
        eval_line(400, 1.75),
    ]
    lines += [event(100, "checkpoint"), event(150, "skipped", "loss is not finite"), event(400, "finished", "done")]
    write_lines(run, *lines)
    for step in (50, 900, 1000, 20000):
        (run / "samples" / f"step-{step}.txt").write_text(f"sample of step {step}\n")
    result = {"split": "test", "loss": 1.3, "bits_per_byte": 1.8765, "perplexity": 3.6, "tokens": 123456}
    (run / "eval_test.json").write_text(json.dumps({**result, "per_position": {"edges": EDGES, "loss": LOSSES}}))
    quick = {"compressors": {"gzip": 1.96, "bzip2": 1.62, "xz": 1.63}, "model": {"bits_per_byte": 1.75}}
    (run / "quickstart.json").write_text(json.dumps(quick))
    (run / "environment.json").write_text(json.dumps({"cpu": "A processor", "memory_bytes": 8_000_000_000}))
    return run


def test_complete_run_has_every_section(full_run: Path) -> None:
    path = write_report(full_run)
    assert path == full_run / "report.html"
    page = path.read_text()
    assert "<h1>my-run</h1>" in page
    words = checked(page)
    for expected in (
        "my-run", "finished", "preset quickstart", "1.750", "its best", "Tokens seen", "6.55M", "40% of peak FLOP/s", "0.90 GB",
        "fewer bits than gzip.", "more than bzip2, xz.", "xz 1.630, bzip2 1.620", "Learning rate", "Gradient norm", "Throughput",
        "Codes used in a batch", "Every unit at step 400", "Loss by position, test", "lower than at positions", "1.8765", "123,456",
        "sample of step 20000", "sample of step 1000", "skipped", "loss is not finite", "Checkpoints saved: 1.",
        "block_len", "A processor", "8.0 GB",
    ):  # fmt: skip
        assert expected in words, expected
    assert words.index("sample of step 20000") < words.index("sample of step 1000") < words.index("sample of step 900")
    assert "sample of step 50" not in words
    assert [p.name for p in full_run.iterdir() if p.name.startswith(".")] == []


def test_same_run_gives_the_same_bytes(full_run: Path) -> None:
    assert render(full_run) == render(full_run)


def test_light_dark_phone_and_paper_are_styled(full_run: Path) -> None:
    page = render(full_run)
    for rule in ("prefers-color-scheme:dark", "@media print", "@media(max-width", "width=device-width"):
        assert rule in page
    used = set(re.findall(r"var\(--(\w+)\)", page))
    assert used <= set(svg.LIGHT)
    assert set(svg.LIGHT) == set(svg.DARK)


def test_nothing_at_all(tmp_path: Path) -> None:
    words = checked(render(tmp_path))
    assert "no metrics yet" in words
    assert "not started" in words


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "train", "step": 0, "time": 0, "loss": 5.5},
        {"kind": "train", "step": 0, "time": 0, "loss": None},
        train_line(1, units=1),
        eval_line(1, 2.0),
        event(0, "start"),
        {"kind": "strange", "step": 3},
    ],
)
def test_single_line(tmp_path: Path, line: dict[str, Any]) -> None:
    write_lines(tmp_path, line)
    assert "Steps" in checked(render(tmp_path))


def evil(field: str) -> str:
    return f"<script>{field}</script>&\"'"


def evil_run(run: Path) -> tuple[Path, list[str]]:
    """A run whose every text is a script, its own name included, and the fields that these texts are in."""
    run = run.rename(run.parent / "<script>name<&\"'")
    (run / "samples" / f"step-99999 {evil('sample').replace('/', '')}.txt").write_text(evil("text"))
    write_lines(
        run,
        {**train_line(1), "loss": evil("loss"), "lr": evil("lr")},
        {**eval_line(2, 1.0), "split": evil("validation")},
        event(3, evil("event"), evil("message")),
    )
    (run / "config.json").write_text(
        json.dumps({"preset": evil("preset"), evil("group"): {evil("key"): [evil("value")]}})
    )
    environment = {evil("variable"): evil("setting"), "versions": {evil("package"): evil("version")}}
    (run / "environment.json").write_text(json.dumps(environment))
    compressors = {evil("compressor"): 1.9, "b": evil("size")}
    (run / "quickstart.json").write_text(json.dumps({"compressors": compressors, "model": {"bits_per_byte": 1.5}}))
    by_position = {"edges": EDGES, "loss": LOSSES}
    (run / "eval_x.json").write_text(
        json.dumps({"split": evil("split"), "loss": evil("x"), "per_position": by_position})
    )
    shown = "name sample text event message preset group key value variable setting package version compressor split"
    return run, [*shown.split()]


def test_text_from_files_is_never_html(full_run: Path) -> None:
    run, fields = evil_run(full_run)
    page = render(run)
    checked(page)
    assert "<script" not in page
    for field in fields:
        assert f"&lt;script&gt;{field}" in page, field


def test_without_autoescape_the_text_would_be_html(full_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails if someone switches autoescape off."""
    run, fields = evil_run(full_run)
    monkeypatch.setattr(templates.environment(), "autoescape", False)
    monkeypatch.setattr(templates.environment(), "cache", None)
    page = render(run)
    in_charts = {"compressor"}  # charts escape by themselves
    assert {field for field in fields if f"<script>{field}" not in page} <= in_charts


def test_control_characters_and_broken_text_are_replaced(full_run: Path) -> None:
    (full_run / "samples" / "step-99999.txt").write_bytes(b"a\x00\x07\xff\tb\n")
    write_lines(full_run, event(3, "al\x1barm", "a \x85 b"))
    (full_run / "quickstart.json").write_text(
        json.dumps({"compressors": {"g\x00zip": 1.9}, "model": {"bits_per_byte": 1.5}})
    )
    page = render(full_run)
    words = checked(page)
    for expected in ("a\ufffd\ufffd\ufffd\tb", "al\ufffdarm", "a \ufffd b", "g\ufffdzip"):
        assert expected in words
    assert re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", page) is None


def test_elements_of_charts_escape_their_text_and_attributes() -> None:
    assert str(svg.text(1, 2.04, "<&>", style='"')) == '<text x="1" y="2" class="&#34;">&lt;&amp;&gt;</text>'
    assert str(svg.rect(0, 0, 1, 1, "f1", title="<b>")).endswith("<title>&lt;b&gt;</title></rect>")
    assert "<script" not in str(svg.Chart([svg.text(0, 0, EVIL)], 1, 1, EVIL))
    assert "<script" not in svg.Chart([svg.text(0, 0, EVIL)], 1, 1, EVIL).standalone(EVIL)


def test_incomplete_character_is_written_as_a_replacement(tmp_path: Path) -> None:
    write_lines(tmp_path, event(1, "alarm", "broken \ud800 here"))
    assert "broken ? here" in checked(write_report(tmp_path).read_text())


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["usage", "perplexity", "edges", "loss", "q"]), inner)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        "time",
        "loss",
        "bits_per_byte",
        "lr",
        "grad_norm",
        "rss_bytes",
        "codebook",
        "event",
        "message",
        "mfu",
        "tokens_per_second",
    ]
)
LINES = st.builds(
    lambda kind, step, rest: {**rest, "kind": kind, "step": step},
    st.sampled_from(["train", "eval", "event"]),
    st.integers(-(10**20), 10**20) | st.integers(0, 5),
    st.dictionaries(NAMES, JUNK, max_size=6),
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(LINES, max_size=5), JUNK, JUNK)
def test_corrupt_files_never_stop_a_report(lines: list[dict[str, Any]], quick: Any, by_position: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        write_lines(run, *lines)
        for name in ("config", "environment"):
            (run / f"{name}.json").write_text(json.dumps(quick))
        (run / "quickstart.json").write_text(json.dumps({"compressors": quick, "model": by_position}))
        (run / "eval_a.json").write_text(json.dumps({"split": quick, "per_position": by_position}))
        (run / "eval_b.json").write_text("{not json")
        checked(render(run))


def test_long_and_deep_run_stays_light(tmp_path: Path) -> None:
    write_lines(
        tmp_path, *(train_line(s, units=96) for s in range(1, 3000, 2)), *(event(s, "skipped") for s in range(500))
    )
    words = checked(render(tmp_path))
    assert "The last 100 of 500 events" in words


def test_paused_time_is_not_counted() -> None:
    lines = [event(0, "start", time=0.0), event(5, "interrupted", time=60.0), event(5, "resume", time=5000.0)]
    assert wall_seconds([*lines, event(9, "finished", time=5030.0)]) == 90.0
    assert wall_seconds([]) == 0.0


def test_smoothing_keeps_straight_lines_straight() -> None:
    line = [0.5 * i for i in range(40)]
    assert figures.smooth(line, 7) == pytest.approx(line)
    assert figures.smooth([0.0, 3.0, 0.0], 1) == [0.0, 1.0, 0.0]


def test_thinning_keeps_ends_and_peaks() -> None:
    y = [0.0] * 5000
    y[1234], y[4321] = 9.0, -9.0
    xs, ys = charts.thin(list(range(5000)), y, 200)
    assert len(xs) <= 204
    assert (xs[0], xs[-1]) == (0, 4999)
    assert max(ys) == 9.0
    assert min(ys) == -9.0


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12), st.integers(1, 12))
def test_ticks_are_few_ordered_and_inside(low: float, span: float, count: int) -> None:
    high = low + span
    if high - low < abs(low) * 1e-9:
        return
    ticks = svg.linear_ticks(low, high, count)
    assert ticks == sorted(ticks)
    assert len(ticks) <= 3 * max(count, 2)
    assert all(low - span * 1e-6 <= t <= high + span * 1e-6 for t in ticks)


def test_numbers_are_short() -> None:
    values = (0, 4e-4, 1.5e-5, 0.0123, 1.2345, 1234, 12345, 999_999, 3.14e6, 2.5e9)
    assert [svg.compact(v) for v in values] == [
        "0",
        "4e-4",
        "1.5e-5",
        "0.0123",
        "1.234",
        "1,234",
        "12.3k",
        "1M",
        "3.14M",
        "2.5G",
    ]
    assert svg.format_ticks([1.5, 2.0]) == ["1.5", "2.0"]


def test_positions_as_a_table_and_a_chart() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(positions.position_table({"edges": EDGES, "loss": LOSSES}))
    text = out.getvalue()
    assert "128–255" in text
    assert "1.3000" in text
    assert f"{1.3 / math.log(2):.4f}" in text
    image = positions.position_svg(EDGES, LOSSES)
    root = ET.fromstring(image)
    assert root.tag.endswith("svg")
    assert "var(" not in image
    assert len(root.findall(".//{*}circle")) == len(LOSSES)


def by_position(losses: list[float], errors: list[float], paired: float) -> dict[str, Any]:
    change = {"early": 1, "last": 2, "nats": losses[1] - losses[2], "standard_error": paired, "sequences": 40}
    return {"edges": [0, 8, 64, 128], "loss": losses, "standard_error": errors, "change": change}


def test_sentence_about_context_agrees_with_its_table_and_states_its_uncertainty() -> None:
    helps = positions.describe_positions(by_position([3.0, 2.0, 1.0], [0.1, 0.1, 0.1], 0.05))
    assert helps == (
        "The loss at positions 64–127 is 1.4427 ± 0.0721 bits per token lower than at positions 8–63 (± one standard error over 40 "
        "sequences): longer context helps."
    )
    harms = positions.describe_positions(by_position([3.0, 2.0, 2.5], [0.1, 0.1, 0.1], 0.05))
    assert "higher than at positions 8–63" in harms
    assert "longer context does not help. The lowest loss is at positions 8–63." in harms
    unclear = positions.describe_positions(by_position([3.0, 2.0, 1.95], [0.1, 0.1, 0.1], 0.05))
    assert "0.0721 ± 0.0721 bits per token lower" in unclear
    assert "not significant" in unclear
    out = io.StringIO()
    Console(file=out, width=100).print(positions.position_table(by_position([3.0, 2.0, 1.0], [0.1, 0.1, 0.2], 0.05)))
    rows = [line for line in out.getvalue().splitlines() if "64–127" in line or "8–63" in line]
    bits = [float(line.split()[5]) for line in rows]
    assert f"{bits[0] - bits[1]:.4f}" == "1.4427"
    assert "± 0.2885" in rows[1]


def test_positions_without_standard_errors() -> None:
    older = {"edges": [0, 8, 64, 128], "loss": [3.0, 2.0, 1.0]}
    assert "the standard error is not known" in positions.describe_positions(older)
    assert "Too few" in positions.describe_positions({"edges": [0, 8], "loss": [3.0]})


def test_standard_error_is_that_of_paired_sequences() -> None:
    """Against the textbook formula, where every sequence has all its tokens: the error of a mean of paired differences."""
    draw = np.random.default_rng(0)
    level = draw.normal(3.0, 1.0, (50, 1))  # texts differ far more than positions of one text
    nats = level + np.array([0.5, 0.2, 0.0, 0.0]) + draw.normal(0, 0.05, (50, 4))
    sums = PositionSums(4)
    assert sums.edges == [0, 1, 2, 4]
    for part in (nats[:30], nats[30:]):
        sums.begin(len(part))
        sums.add(0, part[:, :2], np.ones((len(part), 2)))
        sums.add(2, part[:, 2:], np.ones((len(part), 2)))
    found = sums.finish()
    bins = np.stack([nats[:, 0], nats[:, 1], nats[:, 2:].mean(1)], axis=1)
    np.testing.assert_allclose(found.nats, bins.mean(0))
    np.testing.assert_allclose(found.standard_errors, bins.std(0, ddof=1) / np.sqrt(50))
    assert found.change is not None
    early, last = found.change.early, found.change.last
    difference = bins[:, early] - bins[:, last]
    np.testing.assert_allclose(found.change.nats, difference.mean())
    assert found.change.standard_error is not None
    np.testing.assert_allclose(found.change.standard_error, difference.std(ddof=1) / np.sqrt(50))
    assert found.change.standard_error < 0.2 * found.standard_errors[early], (
        "pairing removes what differs between texts"
    )


def test_recorded_environment_has_no_personal_data() -> None:
    found = environment.describe()
    text = json.dumps(found, allow_nan=False)
    assert found["versions"]["python"].startswith("3.")
    assert found["versions"]["jax"]
    assert found["cores_usable"] >= 1
    assert found["devices"]["count"] >= 1
    words = set(re.split(r"[^\w.-]+", text))
    assert socket.gethostname() not in words
    assert getpass.getuser() not in words
    assert str(Path.home()) not in text
    assert os.getcwd() not in text


def test_memory_is_measured() -> None:
    before = environment.rss_bytes()
    with mmap.mmap(
        -1, 64 << 20
    ) as pages:  # malloc may give memory that is already resident (`environment.keep_memory`)
        pages.write(b"x" * len(pages))
        assert environment.rss_bytes() - before > 32 << 20
        assert environment.peak_rss_bytes() >= environment.rss_bytes() - (8 << 20)
        memory = environment.memory_bytes()
        assert memory is None or memory > len(pages)
