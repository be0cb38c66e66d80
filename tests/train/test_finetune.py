"""Fine-tuning: a run starts from another's weights exactly, records where they came from, and needs the parent only once."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny
import tokenizer_files
from finetuned_runs import SHORT, begun, other_text, parent_run, tuned
from run_comparison import assert_same_bits, lines

from linnet.cli.train import train_command
from linnet.config import codec
from linnet.config.schema import DataConfig
from linnet.core.errors import UserError
from linnet.data import load_dataset
from linnet.runs.folder import RunFolder
from linnet.runs.load import open_run, open_state
from linnet.runs.metrics import read_metrics
from linnet.runs.state import fresh_buffers
from linnet.runs.weights import model_leaves, write_stored_run
from linnet.runs.weights_file import export_safetensors
from linnet.tokenizers.load import open_tokenizer
from linnet.train import parent as parents
from linnet.train.finetune_config import tuned_config
from linnet.train.loop import train
from linnet.train.parent import find_origin


@pytest.mark.parametrize("kind", ["run", "weights", "file"])
def test_run_starts_from_the_weights_of_a_run_an_import_or_a_file(kind: str, source: Path, tmp_path: Path) -> None:
    run = parent_run(tmp_path, source)
    parent = open_run(run)
    path, buffers = run, parent.buffers
    if kind == "weights":
        path, buffers = tmp_path / "import", fresh_buffers(parent.family, parent.cfg)
        write_stored_run(path, parent.cfg, model_leaves(parent.params), lambda _: None, lambda _: None)
    if kind == "file":
        path = tmp_path / "model.safetensors"
        export_safetensors(parent.params, parent.buffers, codec.to_json(parent.cfg), path)
    cfg = tuned(path, source)
    parents.check_parent(cfg)
    assert cfg.parent is not None
    assert (cfg.parent.path, len(cfg.parent.fingerprint)) == (str(path), 64)
    state = begun(cfg)
    assert_same_bits(state.params, parent.params)
    assert_same_bits(state.buffers, buffers)
    assert int(state.step) == 0
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(state.opt_state))


def test_fine_tuned_run_resumes_exactly_without_its_parent(source: Path, tmp_path: Path) -> None:
    run = parent_run(tmp_path, source, "moe")
    cfg, mark = tuned(run, other_text(tmp_path)), find_origin(run).fingerprint
    assert train(cfg, RunFolder(tmp_path / "whole"), quiet=True).finished
    assert not train(cfg, RunFolder(tmp_path / "cut"), quiet=True, stop_at=2).finished
    shutil.rmtree(run)
    assert train(codec.load(tmp_path / "cut" / "config.json"), RunFolder(tmp_path / "cut"), quiet=True).finished
    assert_same_bits(open_state(tmp_path / "cut", "latest")[1], open_state(tmp_path / "whole", "latest")[1])
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    records = read_metrics(tmp_path / "whole")
    assert [r["step"] for r in records if r["kind"] == "eval"] == [0, 3, 6]  # step 0: what the parent achieves
    (start,) = [r for r in records if r.get("event") == "start"]
    assert f"from {run} (step 0, {mark[:12]})" in start["message"]


def test_run_killed_before_its_first_checkpoint_starts_from_the_parent_again(source: Path, tmp_path: Path) -> None:
    cfg = tuned(parent_run(tmp_path, source), source)
    codec.save(cfg, RunFolder(tmp_path / "out").create().config)
    train(cfg, RunFolder(tmp_path / "out"), quiet=True, stop_at=0)
    assert_same_bits(open_state(tmp_path / "out", "0")[1].params, open_run(tmp_path / "parent").params)


@pytest.mark.slow
def test_kept_optimizer_keeps_its_moments_and_restarts_its_schedule(source: Path, tmp_path: Path) -> None:
    cfg = tiny.config(source, **SHORT)
    train(cfg, RunFolder(tmp_path / "run"), quiet=True)
    step = find_origin(tmp_path / "run").step
    theirs = open_state(tmp_path / "run", str(step))[1]
    state = begun(tuned(tmp_path / "run", source, True))
    rule, schedule = theirs.opt_state[1], theirs.opt_state[2]
    assert int(schedule.count) == step > 0
    assert int(state.opt_state[2].count) == 0
    assert_same_bits(state.opt_state[1], rule)
    assert_same_bits(state.params, theirs.params)  # not the average: the moments belong to these
    assert_same_bits(state.ema, theirs.ema)
    without = begun(tuned(tmp_path / "run", source))
    assert_same_bits(without.params, theirs.ema)  # what was evaluated


def test_best_checkpoint_is_the_default(source: Path, tmp_path: Path) -> None:
    train(tiny.config(source, **SHORT), RunFolder(tmp_path / "run"), quiet=True)
    (tmp_path / "run" / "checkpoints" / "best.json").write_text('{"3": 1.0, "6": 2.0}')
    assert find_origin(tmp_path / "run").step == 3
    assert find_origin(tmp_path / "run", "latest").step == 6
    fingerprints = {find_origin(tmp_path / "run", which).fingerprint for which in ("best", "latest", "3")}
    assert len(fingerprints) == 2


def test_defaults_suit_fine_tuning(source: Path, tmp_path: Path) -> None:
    cfg = tiny.config(source, **{"optim.lr": 0.01, "optim.schedule": "constant", "optim.steps": 40_000})
    held_out = dataclasses.replace(cfg.tokens, validation_files=("a",), validation_fraction=0.2)
    cfg = dataclasses.replace(cfg, data=held_out)
    parent = parents.Parent(path="/p", step=1, fingerprint="f")
    full = tuned_config(cfg, parent, other_data=True)
    assert (full.optim.schedule, full.optim.steps, full.optim.warmup_steps) == ("cosine", 1000, 50)
    assert full.optim.lr == pytest.approx(0.003)
    assert full.data == DataConfig(sequence_len=32, update_len=16, batch_size=4)  # the division was the other source's
    assert tuned_config(cfg, parent).data == held_out
    exporting = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, exports=("best:model:/p/best.pth",)))
    assert tuned_config(exporting, parent).train.exports == ()  # they are the parent's files
    assert tuned_config(full, parent).optim.lr == full.optim.lr  # already a rate for fine-tuning
    merged = dataclasses.replace(full, parent=dataclasses.replace(parent, adapters=8))
    assert tuned_config(merged, parent).optim.lr == pytest.approx(0.0009)  # adapters are trained at a higher rate
    lora = tuned_config(cfg, parent, lora=True, steps=10)
    wide = dataclasses.replace(cfg, model=dataclasses.replace(cfg.vq, d_model=768))
    assert tuned_config(wide, parent, lora=True).optim.lr == pytest.approx(0.6 / 768)
    assert (lora.optim.name, lora.optim.lr, lora.optim.warmup_steps, lora.optim.decay) == ("adamw", 5e-3, 0, 0.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.d_model": 32}, "model.d_model is 32, but it must be 16.*leave --model.d-model out"),
        ({"model.mem_len": 16}, "model.mem_len is 16"),
        ({"lora.rank": 99}, "lora.rank is 99, but it must be at most 16, the smaller side of units/w_q"),
        ({"lora.rank": 2, "lora.targets": ("w_x",)}, "lora.targets is 'w_x'.*units/w_q.*w_out"),
    ],
    ids=str,
)
def test_mismatches_with_the_parent_are_rejected_and_leave_nothing(
    changes: dict[str, Any], words: str, source: Path, tmp_path: Path
) -> None:
    cfg = tuned(parent_run(tmp_path, source), source, **changes)
    with pytest.raises(UserError, match=words):
        train(cfg, RunFolder(tmp_path / "out"), quiet=True)
    assert not (tmp_path / "out").exists()


def test_settings_that_only_concern_training_may_change(source: Path, tmp_path: Path) -> None:
    cfg = tuned(parent_run(tmp_path, source), source)
    model = dataclasses.replace(cfg.vq, p_dropres=0.0, block_len=4, c_gamma=0.9, remat="full")
    data = dataclasses.replace(cfg.tokens, sequence_len=64, update_len=8)
    parents.check_parent(dataclasses.replace(cfg, model=model, data=data))


@pytest.mark.parametrize(
    ("flags", "changes", "words"),
    [
        ({"optim.name": "muon"}, {}, "optim.name is 'muon', but it must be 'adamw'"),
        ({"lora.rank": 2}, {}, "left out with adapters"),
    ],
    ids=str,
)
def test_optimizer_that_cannot_be_kept_is_rejected(
    flags: dict[str, Any], changes: dict[str, Any], words: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        parents.check_parent(tuned(parent_run(tmp_path, source, **changes), source, True, **flags))


def test_parent_that_changed_is_rejected(source: Path, tmp_path: Path) -> None:
    run = parent_run(tmp_path, source)
    cfg = tuned(run, source)
    shutil.rmtree(run)
    parent_run(tmp_path, source, seed=1)
    with pytest.raises(UserError, match="no longer what this run was to start from"):
        train(cfg, RunFolder(tmp_path / "out"), quiet=True)
    assert not (tmp_path / "out").exists()


def test_8_bit_weights_are_trained_by_adapters_only(source: Path, tmp_path: Path) -> None:
    from linnet.core import quant

    parent = open_run(parent_run(tmp_path, source, "moe"))
    lowered = quant.cast_params(parent.params, parent.family.param_specs(parent.cfg.model), "int8")
    write_stored_run(tmp_path / "int8", parent.cfg, model_leaves(lowered), lambda _: None, lambda _: None)
    with pytest.raises(UserError, match=r"8-bit weights, which cannot be trained.*--lora.rank 8"):
        parents.check_parent(tuned(tmp_path / "int8", source))
    cfg = tuned(tmp_path / "int8", source, **{"lora.rank": 2})
    parents.check_parent(cfg)
    state = begun(cfg)
    want = jax.tree.map(lambda x: quant.to_array(x, np.float32), lowered, is_leaf=quant.is_quantized)
    assert_same_bits(state.base, want)


def test_text_of_another_tokenizer_is_rejected_with_the_command_that_prepares_it(source: Path, tmp_path: Path) -> None:
    (tmp_path / "own.model").write_bytes(tokenizer_files.sentencepiece(byte_fallback=True, model_type="bpe"))
    tokenizer = open_tokenizer(str(tmp_path / "own.model"))
    run = parent_run(tmp_path, source, **{"model.n_vocab": tokenizer.n_vocab, "model.end_id": tokenizer.eos_id})
    tokenizer.save(run)
    with pytest.raises(UserError, match=f"linnet data prepare SOURCE --tokenizer {run} --out DIR"):
        train(tuned(run, source), RunFolder(tmp_path / "out"), quiet=True)
    assert not (tmp_path / "out").exists()


def test_image_model_is_not_fine_tuned_on_text(source: Path, tmp_path: Path) -> None:
    run = parent_run(tmp_path, source)
    (run / "data.json").write_text('{"kind": "pixels", "shape": [16, 16, 3]}')
    with pytest.raises(UserError, match=r"data.source is .*must be pixels, which .* was trained on .this is text"):
        train(tuned(run, source), RunFolder(tmp_path / "out"), quiet=True)
    assert not (tmp_path / "out").exists()


# The command.


def test_command_never_overwrites_and_says_what_to_do(source: Path, tmp_path: Path) -> None:
    run = str(parent_run(tmp_path, source))

    def rejection(*argv: str) -> str:
        with pytest.raises(UserError) as caught:
            train_command(list(argv))
        return str(caught.value)

    assert "leave one of them out" in rejection("quickstart", "--from", run)
    assert "the run to start from, and nothing is overwritten" in rejection("--from", run, "--out", run)
    assert "there is no such run or file" in rejection("--from", str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    assert "is not a run (it has no config.json)" in rejection("--from", str(tmp_path / "empty"))
    (tmp_path / "model.pth").write_bytes(b"x")
    assert "import it first" in rejection("--from", str(tmp_path / "model.pth"))
    shutil.copytree(run, tmp_path / "another")
    assert "started from random or imported weights" in rejection("--from", run, "--out", str(tmp_path / "another"))
    assert "add --from RUN" in rejection("quickstart", "--keep-optimizer", "--out", str(tmp_path / "new"))
    adapters = rejection("quickstart", "--lora.rank", "4", "--out", str(tmp_path / "new"))
    assert "adapters need weights to adapt. Fix: add --from RUN" in adapters
    other = rejection(run, "--data.source", str(other_text(tmp_path)))
    assert f"linnet train --from {run} --data.source .. --out ANOTHER" in other
    assert "--out without --from starts from random weights" in other
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_same_command_continues_and_needs_no_parent(source: Path, tmp_path: Path) -> None:
    run, mine = parent_run(tmp_path, source), other_text(tmp_path)
    flags = [
        "--data.source",
        str(mine),
        "--optim.steps",
        "2",
        "--train.eval-every",
        "0",
        "--train.keep",
        "9",
        "--quiet",
    ]
    command = ["--from", str(run), *flags, "--out", str(tmp_path / "out")]
    assert train_command(command) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["parent"]["path"] == str(run)
    assert written["optim"]["lr"] == pytest.approx(9e-4)  # 0.3 of the parent's
    shutil.rmtree(run)
    assert train_command([*command, "--optim.extra-steps", "1"]) == 0
    assert open_state(tmp_path / "out", "latest")[2] == 3


def test_run_from_random_weights_says_so(source: Path, tmp_path: Path) -> None:
    train(tiny.config(source), RunFolder(tmp_path), quiet=True, stop_at=0)
    (start,) = [r for r in read_metrics(tmp_path) if r.get("event") == "start"]
    assert "Starting at step 0 of 40 from random weights (seed 0)" in start["message"]


def test_data_of_another_tokenizer_than_an_exported_file_is_rejected(source: Path, tmp_path: Path) -> None:
    """A file holds no tokenizer, only its fingerprint; sizes alone would let bytes pass for the ids of any larger vocabulary."""
    path = parent_run(tmp_path, source, **{"model.n_vocab": 512})
    parent, file = open_run(path), tmp_path / "model.safetensors"
    export_safetensors(parent.params, parent.buffers, codec.to_json(parent.cfg), file)
    with pytest.raises(UserError, match=r"another tokenizer .*not recorded.*linnet import safetensors"):
        train(tuned(file, other_text(tmp_path)), RunFolder(tmp_path / "run"), quiet=True)
    assert not (tmp_path / "run").exists()


def test_plain_text_is_encoded_with_the_parents_tokenizer(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.model").write_bytes(tokenizer_files.sentencepiece(byte_fallback=True, model_type="bpe"))
    tokenizer = open_tokenizer(str(tmp_path / "own.model"))
    run = parent_run(tmp_path, source, **{"model.n_vocab": tokenizer.n_vocab, "model.end_id": tokenizer.eos_id})
    tokenizer.save(run)
    for i in range(30):
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / f"{i}.txt").write_text(f"text number {i} in words of its own; " * 30)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SHORT.items()]
    command = ["--from", str(run), "--data.source", "mine", "--out", "tuned", *flags]
    assert train_command(command) == 0
    assert "Encoding mine with the model's tokenizer" in capsys.readouterr().out
    data = load_dataset(codec.load(tmp_path / "tuned" / "config.json").tokens, 0)
    assert data.tokenizer.fingerprint == tokenizer.fingerprint
    assert data.validation.n_tokens, "a part is held out"
    assert train_command([*command, "--optim.extra-steps", "1"]) == 0, "the same command continues the run"
    assert "Encoding" not in capsys.readouterr().out
    (tmp_path / "mine" / "0.txt").write_text("other text " * 50)
    with pytest.raises(UserError, match="tuned"):
        train_command([*command, "--optim.extra-steps", "2"])
