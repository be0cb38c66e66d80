"""The report of a prior, and `linnet eval` of one: what a prior has is there, what only texts have is not."""

from __future__ import annotations

import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_prior
from hypothesis import given, settings
from hypothesis import strategies as st
from test_report import EVIL, JUNK, Checker, checked, event, write_lines

from linnet.cli.evaluate import eval_command
from linnet.config import codec
from linnet.config import schema as config
from linnet.core.errors import UserError
from linnet.data.embeddings import open_pairs
from linnet.evaluate import retrieval
from linnet.evaluate.prior import FIGURES, evaluate_prior
from linnet.evaluate.retrieval import Row, SimilarityMatrix
from linnet.report import prior as report_prior
from linnet.report.build import render, write_report
from linnet.report.heat_maps import matrix_chart, shorten
from linnet.runs.load import write_run


def train_line(step: int) -> dict[str, Any]:
    loss = 0.3 + math.exp(-step / 50)
    return {
        "kind": "train", "step": step, "time": 1e9 + step, "loss": loss, "lr": 1e-4, "grad_norm": 0.5, "mfu": 0.25, "rss_bytes": 9e8,
        "tracking/training-l2": loss, "tracking/samples-sec": 321.0, "tracking/samples-seen": 64 * step, "tracking/epoch": step // 97,
        "tracking/ema-decay": 1 - (1 + step) ** (-2 / 3),
    }  # fmt: skip


def evaluated(kind: str, split: str, step: int, counts: tuple[int, ...] = (16, 64), who: str = "ema") -> dict[str, Any]:
    figures = {
        f"metrics/{who}-{split}/{name} [steps={n}]": 0.1 * i + n / 1e3 + step / 1e6
        for n in counts
        for i, name in enumerate(FIGURES, 1)
    }
    losses = {f"metrics/{one}-{split}/l2-loss": 0.5 - step / 1e4 for one in ("online", who)}
    return {"kind": kind, "step": step, "time": 1e9 + step, "split": split, "loss": 0.4, **losses, **figures}


def some_rows() -> list[Row]:
    figures = {
        "prior": (0.61, 0.31, 0.71),
        "text": (0.39, 0.15, 0.5),
        "mean": (0.03, 0.01, 0.1),
        "ridge": (0.45, 0.13, 0.48),
    }
    return [Row(name=k, cosine=a, recall_1=b, recall_10=c, n=1096) for k, (a, b, c) in figures.items()]


def square(n: int, caption: str = "caption number") -> SimilarityMatrix:
    cosines = tuple(tuple(0.8 if i == j else 0.1 + (i - j) / 1e3 for j in range(n)) for i in range(n))
    return SimilarityMatrix(captions=tuple(f"{caption} {i}" for i in range(n)), cosines=cosines, by="text")


def tiny_config(**changes: Any) -> config.RunConfig:
    model = tiny_prior.config(text_encodings=False, max_text_len=0)
    return config.RunConfig(preset="prior-emoji", family="prior", model=model, **changes)


def prior_run(tmp_path: Path, *lines: Any) -> Path:
    run = tmp_path / "my-prior"
    run.mkdir()
    codec.save(
        tiny_config(data=config.PairsConfig(), train=config.TrainConfig(eval_timesteps=(16,))), run / "config.json"
    )
    write_lines(run, *lines)
    return run


@pytest.fixture
def full_run(tmp_path: Path) -> Path:
    lines = [event(0, "start"), *(train_line(s) for s in range(5, 405, 5))]
    lines += [
        evaluated("eval", "validation", 200),
        evaluated("eval", "validation", 400),
        evaluated("test", "test", 400),
    ]
    run = prior_run(tmp_path, *lines, event(400, "finished"))
    retrieval.write(run, some_rows(), square(32), "test", 400, 64)
    return run


def test_complete_run_has_every_section(full_run: Path) -> None:
    words = checked(write_report(full_run).read_text())
    for expected in (
        "family prior", "finished", "0.4000", "validation; its best", "Cosine with the image", "Pairs seen", "25.6k",
        "Pairs per second", "321", "25% of peak FLOP/s", "validation, online", "validation, EMA", "Five cosines",
        "16 steps", "64 steps", "EMA decay",
        "samples per second", "this prior", "the text embedding itself", "the mean image embedding",
        "ridge regression", "0.6100", "0.3100",
        "0.7100", "0.1300", "1,096 pairs of the test split", "64 denoising steps", "beats every baseline", "caption number 31",
        "32 of 32 rows have their maximum", "its mean is 0.800",
    ):  # fmt: skip
        assert expected in words, expected
    for name, good in report_prior.GOOD_VALUES.items():
        assert name[0].upper() + name[1:] in words
        assert good in words
    assert "test; 64 steps" in words  # the headline is the final test's, at the most steps


def test_text_sections_are_absent(full_run: Path) -> None:
    words = checked(render(full_run))
    for absent in (
        "per byte",
        "per token",
        "Tokens",
        "position",
        "Codebook",
        "Expert",
        "Samples",
        "compressor",
        "perplexity",
    ):
        assert absent not in words, absent


def test_five_figures_have_the_names_they_are_logged_by() -> None:
    assert tuple(report_prior.GOOD_VALUES) == FIGURES
    record = evaluated("eval", "validation", 100, who="online")
    assert list(report_prior.cosines_of(record)) == [16, 64]
    assert list(report_prior.cosines_of(record)[16]) == list(FIGURES)
    assert report_prior.losses_of(record) == {"online": pytest.approx(0.49)}
    assert set(report_prior.losses_of(evaluated("eval", "validation", 100))) == {"online", "ema"}


def test_run_that_has_only_begun_shows_what_there_is(tmp_path: Path) -> None:
    run = prior_run(tmp_path, event(0, "start"), train_line(5))
    words = checked(render(run))
    assert "Pairs per second" in words
    for absent in ("Five cosines", "Retrieval", "Similarity of captions", "Nearest images", "validation, EMA"):
        assert absent not in words
    (run / "metrics.jsonl").unlink()
    assert "no metrics yet" in checked(render(run))


def test_linnet_eval_results_have_their_own_row(full_run: Path) -> None:
    record = {**evaluated("x", "test", 300, counts=(8,)), "step": 300}
    (full_run / "eval_test.json").write_text(json.dumps(record))
    assert "test, by linnet eval" in checked(render(full_run))


def test_images_are_allowed_by_the_pages_own_policy(full_run: Path) -> None:
    (full_run / "samples").mkdir()
    (full_run / "samples" / "red heart.png").write_bytes(b"\x89PNG and so on")
    page = render(full_run)
    assert "Nearest images" in page
    assert 'src="data:image/png;base64,' in page
    policy = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "img-src data:" in policy[0]
    assert "script" not in policy[0]


def test_captions_are_never_html(full_run: Path) -> None:
    retrieval.write(full_run, [Row(name=EVIL, cosine=0.1, recall_1=0, recall_10=0, n=3)], square(3, EVIL), EVIL, 1, 1)
    page = render(full_run)
    assert "<script" not in page
    # The name, the split (twice), the captions of rows, columns and cells.
    assert checked(page).count("alert('x')") >= 4


def test_largest_matrix_stays_small_and_is_drawn_completely(full_run: Path) -> None:
    retrieval.write(full_run, some_rows(), square(40, "a caption of many words, with, commas and"), "test", 1, 1)
    checked(render(full_run))
    names = [f"caption {i}" for i in range(40)]
    wide, narrow = (
        str(matrix_chart(names, square(40).cosines, label="x", row_label="r", column_label="c", width=w))
        for w in (1040, 360)
    )
    assert wide.count("<rect") == 40 * 40 + 20  # and the scale of colours
    assert "caption 39" in wide
    n_narrow = math.isqrt(narrow.count("<rect") - 20)
    assert 8 <= n_narrow < 40
    checker = Checker()
    checker.feed(narrow)
    assert len([word for word in checker.texts if re.fullmatch(r"caption \d+…?", word)]) == 2 * n_narrow
    wanted = max(float(y) for y in re.findall(r' y="([\d.]+)"', narrow))
    height = re.search(r'viewBox="0 0 360 ([\d.]+)"', narrow)
    assert height is not None
    assert wanted < float(height[1])


def test_colour_follows_the_value_and_no_number_is_blank() -> None:
    values = [[0.0, 0.5], [math.nan, 1.0]]
    chart = str(matrix_chart(["a", "b"], values, label="x", row_label="r", column_label="c"))
    cells = re.findall(r'class="(h\d+)"[^>]*><title>([^<]*)<', chart)
    assert cells == [("h0", "a / a: 0.00"), ("h10", "a / b: 0.50"), ("h19", "b / b: 1.00")]
    assert "<title>" not in str(matrix_chart(["a"], [[math.nan]], label="x", row_label="r", column_label="c"))


def test_long_captions_are_cut_and_marked() -> None:
    assert shorten("red  heart\n", 10) == "red heart"
    assert shorten("red heart, love", 11) == "red heart…"


def test_verdict_names_baselines_that_are_not_beaten() -> None:
    rows = some_rows()
    assert "beats every baseline" in report_prior.verdict(rows)
    worse = [Row(name="prior", cosine=0.4, recall_1=0.31, recall_10=0.5, n=9), *rows[1:]]
    words = report_prior.verdict(worse)
    assert words == "The prior does not beat ridge regression in cosine; the text embedding itself in recall@10."
    broken = [Row(name="prior", cosine=math.nan, recall_1=0.9, recall_10=0.9, n=9), *rows[1:]]
    assert "in cosine" in report_prior.verdict(broken)
    assert report_prior.verdict(rows[1:]) == ""


NAMES = st.sampled_from(
    ["loss", "split", "tracking/samples-sec", "tracking/samples-seen", "tracking/ema-decay", "metrics/ema-validation/l2-loss",
     "metrics/ema-validation/similarity with text [steps=64]", "metrics/ema-test/baseline similarity [steps=0]"]
)  # fmt: skip
LINES = st.builds(
    lambda kind, step, rest: {**rest, "kind": kind, "step": step},
    st.sampled_from(["train", "eval", "test", "event"]),
    st.integers(-(10**20), 10**20) | st.integers(0, 5),
    st.dictionaries(NAMES, JUNK | st.floats(-1, 1), max_size=6),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(LINES, max_size=5), JUNK, st.dictionaries(NAMES, JUNK))
def test_corrupt_files_never_stop_a_report(lines: list[dict[str, Any]], junk: Any, evaluation: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        write_lines(run, *lines)
        (run / "config.json").write_text(json.dumps({"family": "prior", "model": junk}))
        (run / "eval_test.json").write_text(json.dumps({"step": 1, **evaluation}))
        rows = [{"name": junk, "n": 2, "cosine": junk, "recall_1": junk}]
        matrix = {"captions": [junk, junk], "cosines": [[junk, 0.1], [0.2, junk]], "by": "text"}
        values = {"split": junk, "step": 1, "n_steps": 2, "rows": rows, "similarity": matrix}
        (run / "retrieval.json").write_text(json.dumps(values))
        checked(render(run))


# `linnet eval`


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prior of random weights with an average of its own, and forty pairs."""
    root = tmp_path_factory.mktemp("tiny")
    draw = np.random.default_rng(0)
    texts, images = (draw.normal(size=(40, 16)).astype(np.float32) for _ in range(2))
    source = root / "pairs.npz"
    np.savez(source, text_embed=texts, image_embed=images, caption=np.array([f"caption {i}" for i in range(40)]))
    cfg = tiny_config(
        data=config.PairsConfig(source=str(source), validation_fraction=0.2, test_fraction=0.25, batch_size=4),
        train=config.TrainConfig(eval_timesteps=(5,), ema_decay=0.9),
    )
    write_run(root / "run", cfg, tiny_prior.model(cfg.prior), None)
    return root / "run"


def test_prior_is_evaluated_logged_and_reported(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert eval_command([str(tiny), "--split", "test", "--timesteps", "2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((tiny / "eval_test.json").read_text())
    cfg = codec.load(tiny / "config.json")
    pairs = open_pairs(cfg.pairs, cfg.seed)
    weights = tiny_prior.model(cfg.prior)
    expected = evaluate_prior(cfg, {"online": weights, "ema": weights}, pairs, "test", timesteps=(2,)).to_json()
    assert {name: record[name] for name in expected} == pytest.approx(expected)
    assert (record["step"], record["pairs"], record["split"]) == (0, 10, "test")
    assert [row["name"] for row in record["retrieval"]] == ["prior", "best of several", "text", "mean", "ridge"]
    read = retrieval.read(tiny)
    assert read is not None
    assert read.matrix is not None
    assert (read.split, read.n_steps) == ("test", 2)
    assert read.matrix.captions == tuple(f"caption {i}" for i in range(30, 40))
    assert "Retrieval compared with three baselines" in checked(render(tiny))

    assert eval_command([str(tiny), "--limit", "3", "--timesteps", "2"]) == 0
    reported = capsys.readouterr().out
    for words in (
        "validation at step 0",
        "3 pairs",
        "with the online weights",
        "similarity with text",
        "this prior",
        "ridge regression",
    ):
        assert words in reported
    assert retrieval.read(tiny) == read  # a part of a split does not replace the whole
    assert "metrics/ema-validation/similarity with text [steps=2]" in (tiny / "eval_validation.json").read_text()


def test_other_pairs_are_read_whole_and_the_runs_own_table_stays(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = np.random.default_rng(1)
    other = tmp_path / "other.npz"
    np.savez(other, text_embed=draw.normal(size=(6, 16)), image_embed=draw.normal(size=(6, 16)))
    (tiny / "retrieval.json").write_text("as it was")
    assert eval_command([str(tiny), "--source", str(other), "--timesteps", "2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["split"], record["pairs"], record["source"]) == ("source", 6, str(other))
    assert [row["name"] for row in record["retrieval"]] == ["prior", "best of several", "text", "mean", "ridge"]
    assert (tiny / "retrieval.json").read_text() == "as it was"
    assert (tiny / "eval_source.json").is_file()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--weights", "int8"], "--weights"),
        (["--timesteps", "0"], "--timesteps"),
        (["--timesteps", "41"], "between 1 and the diffusion's 40"),
    ],
)
def test_flags_that_make_no_sense_are_rejected(tiny: Path, flags: list[str], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        eval_command([str(tiny), *flags])


def test_steps_are_rejected_for_a_run_on_tokens(tmp_path: Path) -> None:
    codec.save(config.RunConfig(), tmp_path / "config.json")
    with pytest.raises(UserError, match="--timesteps"):
        eval_command([str(tmp_path), "--timesteps", "4"])
