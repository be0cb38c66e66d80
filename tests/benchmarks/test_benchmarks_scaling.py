"""`python -m benchmarks.scaling`: linear and dense attention by sequence length."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from bench_results import result, text_of, tiny_task

import benchmarks
from benchmarks import scaling
from benchmarks.worker import run_job
from linnet.bench import table, worker
from linnet.config import presets
from linnet.config.schema import RunConfig
from linnet.core.errors import UserError


def test_mistakes_are_rejected_with_their_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("work began"))
    with pytest.raises(UserError, match="train or eval"):
        scaling.run_scaling("bench-s", [512], job="decode", out=tmp_path / "a.svg")
    with pytest.raises(UserError, match=r"\.svg file in a folder"):
        scaling.run_scaling("bench-s", [512], out=tmp_path / "none" / "a.svg")
    with pytest.raises(UserError, match="use 512"):
        scaling.run_scaling("bench-s", [500], out=tmp_path / "a.svg")
    with pytest.raises(UserError, match="at least 512"):
        scaling.lengths_up_to(100)


class TestScaling:
    def run(self, monkeypatch: pytest.MonkeyPatch, out: Path, **options: Any) -> dict[str, Any]:
        """Linear: 1,000 tokens a CPU-second always. Dense: half of that at 2,048, falling with the length."""

        def fake(job: str, cfg: RunConfig, **_: Any) -> dict[str, Any]:
            n = cfg.tokens.sequence_len
            assert cfg.data.batch_size == 1
            rate = 1000.0 if job == "train" else 500.0 * 2048 / n
            if job == "train" and n > 8192:
                return {"stopped": "it needs 99 GB"}
            return result(
                job=job, sequence_len=n, tokens_per_cpu_second=rate, tokens_per_second=rate, seconds_per_run=n / rate
            )

        monkeypatch.setattr(scaling, "measure_in_subprocess", fake)
        return scaling.run_scaling("bench-s", [8192, 2048, 4096, 16384], out=out, **options)

    def test_only_measured_points_and_the_reason_for_missing_ones(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        got = self.run(monkeypatch, tmp_path / "s.svg", time_limit=20.0)
        assert [row["sequence_len"] for row in got["points"]] == [2048, 4096, 8192]
        assert [bool(row["dense"]) for row in got["points"]] == [True, True, False]
        assert got["stopped"]["linear"] == "not measured from 16,384 tokens on, because it needs 99 GB"
        assert got["stopped"]["dense"].startswith(
            "not measured from 8,192 tokens on, because one run would take longer than 20"
        )
        assert [row.get("linear_over_dense") for row in got["points"]] == [2.0, 4.0, None]
        assert [row["over_2048"] for row in got["points"]] == [1.0, 1.0, 1.0]

    def test_table_and_the_plot_show_the_measured_points(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        out = tmp_path / "s.svg"
        got = self.run(monkeypatch, out)
        drawing = ElementTree.fromstring(out.read_text())
        assert sum(e.tag.endswith("circle") for e in drawing.iter()) >= 3 + 4  # linear to 8,192, dense to 16,384
        words = text_of(table.to_rich(scaling.scaling_table(got)))
        assert "8.00x (target 3)" in words
        assert "99 GB" in words
        page = table.to_markdown(scaling.scaling_table(got))
        assert "| 8,192 | 1,000 | 125 | 8.00x (target 3) |" in page
        assert "commit aaaaaaaaaaaa, A processor, 2 cores usable, 16 GiB, jax 0.10.2" in page

    def test_lengths_double(self) -> None:
        assert scaling.lengths_up_to(3000) == [512, 1024, 2048]
        assert scaling.lengths_up_to()[-1] == 65_536

    def test_dropout_is_left_out(self) -> None:
        cfg = scaling._without_dropout(presets.get("enwik8"))
        assert (cfg.vq.p_dropsin, cfg.vq.p_dropres, cfg.vq.p_droplyr) == (0.0, 0.0, 0.0)


@pytest.mark.trial
@pytest.mark.parametrize("job", ["train-dense", "eval-dense"])
def test_dense_jobs_run(job: str) -> None:
    assert worker.run_task(tiny_task(job), run_job)["tokens_per_cpu_second"] > 0


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("scaling", ["--max-sequence-len", "--forward-only", "--out", "--seconds", "--json", "--markdown"]),
        ("serve_http", ["--preset", "--seconds", "--json", "--markdown"]),
        ("import_memory", ["--json", "--markdown"]),
    ],
)
def test_commands_list_their_flags(name: str, flags: list[str]) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    root = Path(benchmarks.__file__).parents[1]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout
    for flag in flags:
        assert flag in shown, flag
    assert "Print a Markdown table." in shown
