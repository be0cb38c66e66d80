"""`linnet.train` is `linnet train`, bit for bit, and reports its steps to a program."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import linnet
from linnet.api.training import train as train_function
from linnet.cli import main
from linnet.config import codec
from linnet.runs.load import open_state
from linnet.train.interrupt import Interrupt
from linnet.train.notebook import NotebookBar

SETTINGS: dict[str, Any] = {"optim.steps": 12, "train": {"eval_every": 6, "log-every": 1}}
FLAGS = ("--optim.steps", "12", "--train.eval-every", "6", "--train.log-every", "1", "--quiet")
MEASURED = ("time", "tokens_per_second", "rss_bytes", "mfu", "seconds", "data_seconds", "flops")


def command(*arguments: str) -> None:
    with pytest.raises(SystemExit) as exit:
        main(list(arguments))
    assert not exit.value.code


def learned(run: Path) -> list[dict[str, Any]]:
    """Losses and gradients of all updates and evaluations."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    fields = ("kind", "step", "loss", "grad_norm", "lr")
    return [{name: line.get(name) for name in fields} for line in lines if line["kind"] in ("train", "eval", "test")]


def assert_same_weights(a: Path, b: Path, step: int) -> None:
    ours, theirs = (jax.tree.leaves(open_state(run, str(step))[1]) for run in (a, b))
    for one, other in zip(ours, theirs, strict=True):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    codec.save(tiny.config(tiny.corpus(folder)), folder / "tiny.json")
    return folder / "tiny.json"


@pytest.fixture(scope="module")
def trained(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[linnet.TrainingResult, list[Any]]:
    steps: list[Any] = []
    out = tmp_path_factory.mktemp("runs") / "python"
    return linnet.train(config, SETTINGS, out=out, quiet=True, on_step=lambda *given: steps.append(given)), steps


def test_training_equals_the_command_bit_for_bit(
    config: Path, trained: tuple[linnet.TrainingResult, list[Any]], tmp_path: Path
) -> None:
    result, _ = trained
    command("train", str(config), *FLAGS, "--out", str(tmp_path / "command"))
    assert learned(result.path) == learned(tmp_path / "command")
    assert (result.path / "config.json").read_text() == (tmp_path / "command" / "config.json").read_text()
    assert_same_weights(result.path, tmp_path / "command", 12)


def test_result_has_the_final_metrics(trained: tuple[linnet.TrainingResult, list[Any]]) -> None:
    result, _ = trained
    assert (result.step, result.finished) == (12, True)
    assert [line["step"] for line in result.metrics if line["kind"] == "train"] == list(range(1, 13))
    assert result._repr_html_().startswith("<p><code>")  # tags, not escaped text
    assert "<style>" in result._repr_html_()  # without the report's style sheet, curves would be filled areas
    assert "<svg" in result._repr_html_()
    assert "finished at step 12" in result._repr_html_()
    run = result.load("latest")
    assert run.step == 12
    assert run.config.optim.steps == 12


def test_on_step_is_called_for_every_step(trained: tuple[linnet.TrainingResult, list[Any]]) -> None:
    result, steps = trained
    assert [step for step, _ in steps] == list(range(1, 13))
    logged = {line["step"]: line["loss"] for line in result.metrics if line["kind"] == "train"}
    for step, metrics in steps:
        assert metrics["loss"] == pytest.approx(logged[step], rel=1e-6)
        assert math.isfinite(metrics["grad_norm"])


def test_same_call_returns_the_finished_run(config: Path, trained: tuple[linnet.TrainingResult, list[Any]]) -> None:
    result, steps = trained
    again = linnet.train(config, SETTINGS, out=result.path, quiet=True, on_step=lambda *given: steps.append(given))
    assert (again.step, again.finished, len(steps)) == (12, True, 12)


@pytest.mark.slow
def test_fine_tuning_equals_the_command(trained: tuple[linnet.TrainingResult, list[Any]], tmp_path: Path) -> None:
    result, _ = trained
    settings = {"optim.steps": 4, "lora.rank": 2, "train.log_every": 1}
    tuned = linnet.train(settings=settings, from_run=result.path, out=tmp_path / "python", quiet=True)
    flags = ("--optim.steps", "4", "--lora.rank", "2", "--train.log-every", "1", "--quiet")
    command("train", "--from", str(result.path), *flags, "--out", str(tmp_path / "command"))
    assert learned(tuned.path) == learned(tmp_path / "command")


def test_paths_in_settings_are_relative_to_the_working_directory(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.corpus(tmp_path)
    monkeypatch.chdir(tmp_path)
    steps = {"optim.steps": 1, "optim.warmup_steps": 0, "train.eval_every": 0}
    result = linnet.train(config, {**steps, "data.source": Path("corpus.txt")}, quiet=True)
    assert result.path == Path("runs/tiny")
    assert codec.load(result.path / "config.json").data.base == str(tmp_path)


def test_function_and_the_package_share_a_name(config: Path) -> None:
    loop, package = importlib.import_module("linnet.train.loop"), cast(Any, linnet.train)
    assert package.loop.train is loop.train is not train_function
    assert inspect.signature(linnet.train) == inspect.signature(train_function)
    with pytest.raises(linnet.UserError, match="from_run"):
        linnet.train()
    program = "import linnet; linnet.train; import linnet.train.loop; print(callable(linnet.train))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": "quickstrat"}, "Did you mean 'quickstart'"),
        ({"settings": {"optim.step": 3}}, "did you mean 'steps'"),
        ({"settings": {"optin.steps": 3}}, "optin"),
        ({"settings": {"optim.steps": "many"}}, "optim.steps"),
        ({"settings": {"optim.steps.more": 3}}, "'optim.steps' is none"),
        ({"settings": {"data.source": "s3://bucket/text"}}, "data.source"),
        ({"settings": {"data.source": "missing.txt"}}, "missing.txt"),
        ({"on_step": 3}, "on_step"),
        ({"keep_optimizer": True}, "from_run"),
        ({"from_run": "runs/x"}, "give one of them"),
        ({"config": None, "from_run": "runs/none"}, "no such run"),
    ],
)
def test_bad_input_is_an_error_and_writes_nothing(
    config: Path, given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(linnet.UserError, match=message):
        linnet.train(**{"config": config, "out": tmp_path / "run", "quiet": True, **given})
    assert not (tmp_path / "run").exists()


def test_program_is_never_ended_by_ctrl_c() -> None:
    """Before there is something to save, and at the second signal, it gets KeyboardInterrupt; the first in between saves."""
    interrupt = Interrupt()
    with pytest.raises(KeyboardInterrupt):
        interrupt.handle_embedded(signal.SIGINT, None)
    interrupt.may_save()
    interrupt.handle_embedded(signal.SIGINT, None)
    assert interrupt.requested
    with pytest.raises(KeyboardInterrupt):
        interrupt.handle_embedded(signal.SIGINT, None)


def test_ctrl_c_saves_the_run_and_returns(config: Path, tmp_path: Path) -> None:
    def stop(step: int, metrics: dict[str, float]) -> None:
        if step == 5:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    result = linnet.train(config, SETTINGS, out=tmp_path / "run", quiet=True, on_step=stop)
    assert not result.finished
    assert 5 <= result.step < 12
    assert signal.getsignal(signal.SIGINT) is before
    full = linnet.train(config, SETTINGS, out=tmp_path / "run", quiet=True)
    assert full.finished


def test_notebook_shows_one_output_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Output:
        def update(self, content: str) -> None:
            shown.append(content)

    class Display:
        HTML = staticmethod(str)

        @staticmethod
        def display(content: str, display_id: bool) -> Output:
            assert display_id
            shown.append(content)
            return Output()

    monkeypatch.setitem(sys.modules, "IPython.display", Display)
    with NotebookBar() as bar:
        task = bar.add_task("training", total=10, note="starting")
        bar.update(task, completed=4, note="loss <1")
        bar.console.print("step 4: better", markup=False)
    assert "step 4: better" in shown[-1]
    assert '<progress value="4" max="10"></progress> 4/10 loss &lt;1' in shown[-1]
