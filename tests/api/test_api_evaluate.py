"""`Run.evaluate` is `linnet eval`, of each kind of run."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import linnet
from linnet.cli import main

MADE = Path(__file__).parents[1] / "goldens" / "runs_0_1"
DATA = {"vq": "text.txt", "moe": "prepared", "pixels": "pictures", "prior": "pairs"}


@pytest.mark.parametrize("name", DATA)
def test_evaluate_gives_the_figures_of_the_command(name: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MADE / name, tmp_path / name))
    flags: dict[str, Any] = {"timesteps": (2,)} if name == "prior" else {}
    result = linnet.load(folder).evaluate("test", data_source=MADE / DATA[name], limit=6, quiet=True, **flags)
    assert not list(folder.glob("eval_*"))
    out = io.StringIO()
    command = [
        "eval",
        str(folder),
        "--split",
        "test",
        "--data.source",
        str(MADE / DATA[name]),
        "--limit",
        "6",
        "--json",
    ]
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as exit:
        main([*command, *(["--timesteps", "2"] if name == "prior" else [])])
    assert not exit.value.code
    printed = json.loads(out.getvalue())
    changing = "peak_rss_bytes"
    assert {**json.loads(json.dumps(result.metrics)), changing: 0} == {**printed, changing: 0}
    assert {**json.loads((folder / "eval_test.json").read_text()), changing: 0} == {**printed, changing: 0}
    assert result.loss == printed["loss"]
    assert (result.split, f"loss {result.loss:.4f}" in repr(result)) == ("test", True)
    assert "<th>loss</th>" in result._repr_html_()
    if name == "prior":
        with pytest.raises(linnet.UserError, match="of a language model"):
            _ = result.bits_per_byte
    else:
        assert result.bits_per_byte == printed["bits_per_byte"]
        assert "<svg" in result._repr_html_()


def test_another_dtype_is_compared_with_the_weights_as_loaded(tmp_path: Path) -> None:
    run = linnet.load(MADE / "vq")
    full = run.evaluate(source=MADE / "text.txt", limit=3, quiet=True)
    small = run.evaluate(source=MADE / "text.txt", limit=3, weights="int8", quiet=True)
    assert small.metrics["float32"]["loss"] == full.loss != small.loss
    loaded = linnet.load(MADE / "vq", weights="int8").evaluate(source=MADE / "text.txt", limit=3, quiet=True)
    assert (loaded.loss, loaded.metrics["weights"]) == (small.loss, "int8")


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("vq", {"split": "dev"}, "split is 'dev'"),
        ("vq", {"limit": 0}, "limit is 0"),
        ("vq", {"batch_size": 0}, "batch_size is 0"),
        ("vq", {"sequence_len": 0}, "sequence_len is 0"),
        ("vq", {"timesteps": [2]}, "only a prior predicts in steps"),
        ("vq", {"source": "a", "data_source": "b"}, "leave one of them out"),
        ("prior", {"update_len": 2}, "a prior has no sequences"),
        ("prior", {"timesteps": [99]}, "between 1 and the diffusion's 20"),
        ("prior", {"weights": "int8"}, "left out for a prior"),
    ],
)
def test_bad_settings_are_errors(name: str, given: dict[str, Any], message: str) -> None:
    data = {} if "source" in given else {"data_source": str(MADE / DATA[name])}
    with pytest.raises(linnet.UserError, match=message):
        linnet.load(MADE / name).evaluate(**{"quiet": True, **data, **given})
