"""Grok-1's reference files pass `linnet verify`, every layout of them; and a wrong number in any is seen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grok_files import CONFIG, GOLDENS, TINY_A, write_release

from linnet.core.errors import UserError
from linnet.verify import Verification, verify_file

UNITS, RUNNER, ORDER = GOLDENS / "units" / "units.npz", GOLDENS / "e2e_tinyA.json", GOLDENS / "real_param_order.json"


def failed(result: Verification) -> list[str]:
    return [check.name for check in result.checks if not check.passed]


def copy_of_model(folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    """The model as it is, with other expected values."""
    made = folder / "model"
    made.mkdir()
    (made / "ckpt-0").symlink_to(TINY_A / "ckpt-0")
    shutil.copy(TINY_A / "config.json", made / "config.json")
    np.savez(made / "forward.npz", **arrays)  # pyright: ignore[reportArgumentType]
    return made


@pytest.mark.slow
@pytest.mark.optimized
def test_a_whole_model_passes() -> None:
    result = verify_file(TINY_A)
    assert failed(result) == []
    errors = {check.name: check.error for check in result.checks}
    arrays = np.load(TINY_A / "forward.npz").files
    unchecked = {skipped.name for skipped in result.not_checked}
    assert {name.split("/")[-1] for name in unchecked} <= {"decode_padtoken_logits", "prefill_returned_step"}
    inputs = {"tokens", "tokens_pad", "prefill_lengths", "prefill_pad"}
    assert set(arrays) - inputs - unchecked <= errors.keys(), "all else is compared"
    assert max(error for name, error in errors.items() if name.startswith("f32")) < 1e-5
    assert max(error for name, error in errors.items() if name.startswith("bf16")) < 0.04
    excluded = [check for check in result.checks if "excluded" in check.note]
    assert all(check.name.startswith("bf16/") for check in excluded), "float32 needs no excuse"


@pytest.mark.slow
def test_a_wrong_number_in_a_model_is_seen(tmp_path: Path) -> None:
    arrays = {name: np.array(value) for name, value in np.load(TINY_A / "forward.npz").items()}
    few = ("f32/full_logits", "f32/prefill_logits", "f32/decode_logits", "f32/decode_final_step")
    few += tuple(name for name in arrays if name.startswith("f32pure/") and "/1/" in name)
    few += ("f32pure/cap/transformer/decoder_layer_0/moe:out", "f32pure/prefill_v/0", "f32pure/full_logits_eager")
    for name in few:
        at = (0,) * arrays[name].ndim  # the first position: never padding, never hidden
        full = arrays[name].dtype.kind == "i"
        arrays[name][at] += 1 if full else 3e-5 * np.where(arrays[name] > -1e29, np.abs(arrays[name]), 0).max()
    inputs = ("tokens", "tokens_pad", "prefill_lengths", "prefill_pad")
    kept = {name: arrays[name] for name in (*few, *inputs)} | {"f32/new": np.zeros(3)}
    result = verify_file(copy_of_model(tmp_path, kept) / "forward.npz")
    assert sorted(failed(result)) == sorted(few)
    assert [skipped.name for skipped in result.not_checked] == ["f32/new"]


STREAMS, PIECES = GOLDENS / "e2e_A.json", GOLDENS / "e2e_A_tokenizer.model"


@pytest.mark.optimized
def test_streams_pass_in_both_types_with_their_texts() -> None:
    result = verify_file(STREAMS)
    assert failed(result) == []
    names, runs = {check.name for check in result.checks}, json.loads(STREAMS.read_text())["runs"]
    unsure = {skipped.name for skipped in result.not_checked}
    for i, run in enumerate(runs):
        assert f"runs/{i}/float32_greedy" in names
        assert f"runs/{i}" in names | unsure
        assert ({f"runs/{i}/text", f"runs/{i}/out_text"} <= names) == ("text" in run)


@pytest.mark.slow
def test_a_wrong_stream_or_text_is_seen(tmp_path: Path) -> None:
    """Beside two models of the same sizes: the file says whose it is."""
    (tmp_path / "tiny_A").symlink_to(TINY_A)
    (tmp_path / "tiny_Z").symlink_to(TINY_A)
    shutil.copy(PIECES, tmp_path / PIECES.name)
    full = json.loads(STREAMS.read_text())
    sure = next(run for run in full["runs"] if run["router_margin"] >= 0.01 and min(run["float32_gap"]) >= 0.05)
    text = next(run for run in full["runs"] if "text" in run)
    bad_out = {**sure, "out": [*sure["out"][:-1], 7]}
    bad_float = {**sure, "float32_greedy": [*sure["float32_greedy"][:-1], 7]}
    bad_text = {**text, "text": text["text"] + "s", "out_text": text["out_text"] + " "}
    (tmp_path / "e2e_A.json").write_text(json.dumps({**full, "runs": [bad_out, bad_float, bad_text]}))
    result = verify_file(tmp_path / "e2e_A.json")
    assert failed(result) == ["runs/2/text", "runs/2/out_text", "runs/0", "runs/1/float32_greedy"]
    assert any("tiny_A" in note for note in result.notes)


def test_units_pass() -> None:
    result = verify_file(UNITS)
    assert failed(result) == []
    names = {check.name.split(": ")[0] for check in result.checks} | {skipped.name for skipped in result.not_checked}
    outputs = {name for name in np.load(UNITS).files if not name.endswith(("/x", "/x_bf16", "/logits"))}
    inputs = {"rms/scale", "qlinear/weight", "qlinear/scales"}
    inputs |= {f"sample/{name}" for name in ("temperature", "nucleus_p", "mask", "keys")}
    assert outputs - inputs <= names
    assert any("ffn_size" in check.name for check in result.checks)
    # Without ties and at float32 the nucleus is the release's, token for token.
    assert [c.note for c in result.checks if c.name.startswith("top_p/rand/f32") and c.name.endswith("mask")] == [
        "equal"
    ] * 5


@pytest.mark.slow
def test_a_wrong_number_in_units_is_seen(tmp_path: Path) -> None:
    arrays = {name: np.array(value) for name, value in np.load(UNITS).items()}
    wrong = ("rope/16/off0/f32", "rms/f32", "gelu/y", "softcap/y", "qlinear/f32/jit", "sample/f32/probs")
    for name in wrong:
        arrays[name][tuple(np.argwhere(arrays[name] != 0)[0])] += 3e-5 * np.abs(arrays[name]).max()
    likeliest = np.argmax(arrays["top_p/rand/f32/0.5"][0])
    arrays["top_p/rand/f32/0.5"][0, likeliest] = -1e10
    arrays["top_p/ties/f32/0.9"][0, np.argmin(arrays["top_p/ties/logits"][0])] = 1.0
    path = tmp_path / "units.npz"
    np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]
    found = set(failed(verify_file(path)))
    assert {*wrong, "top_p/rand/f32/0.5: mask", "top_p/ties/f32/0.9: mask"} <= found


def runner(folder: Path, change: Any) -> Path:
    reported = json.loads(RUNNER.read_text())
    reported["runs"] = reported["runs"][:2]
    change(reported)
    (folder / TINY_A.name).symlink_to(TINY_A)
    (folder / RUNNER.name).write_text(json.dumps(reported))
    return folder / RUNNER.name


def test_the_runners_greedy_streams_are_written() -> None:
    result = verify_file(RUNNER)
    assert failed(result) == []
    runs = json.loads(RUNNER.read_text())["runs"]
    greedy = [f"runs/{i}" for i, run in enumerate(runs) if run["temperature"] == 0.01]
    assert [check.name for check in result.checks] == greedy
    parted = [check.note for check in result.checks if check.note != "equal"]
    assert len(parted) <= 1, "a greedy stream parts at a tie of bfloat16 at most"
    assert all("within bfloat16 rounding" in note for note in parted)
    assert len(result.not_checked) == len(runs) - len(greedy)
    assert all("random stream" in skipped.reason for skipped in result.not_checked)


def test_a_wrong_token_or_multiplier_of_a_runner_is_seen(tmp_path: Path) -> None:
    def change(reported: dict[str, Any]) -> None:
        reported["runs"][0]["out"][5] += 1

    assert failed(verify_file(runner(tmp_path, change))) == ["runs/0"]


def test_the_order_of_the_real_checkpoint_passes_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    assert failed(verify_file(ORDER)) == []
    listed = json.loads(ORDER.read_text())
    listed[20], listed[21] = [20, *listed[21][1:]], [21, *listed[20][1:]]
    listed[40][2][0] += 1
    listed[300][4] = "PartitionSpec('model',)"
    path = tmp_path / "order.json"
    path.write_text(json.dumps(listed))
    assert failed(verify_file(path)) == ["numbers and names", "shapes", "partition"]
    path.write_text(json.dumps(listed[:-1]))
    assert not verify_file(path).passed


def test_what_is_no_reference_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "forward.npz"
    np.savez(path, tokens=np.zeros((1, 2), np.int32))
    with pytest.raises(UserError, match="its model beside it"):
        verify_file(path)
    other = tmp_path / "some.json"
    for text, reported in (
        ("{", "JSON"),
        ("{}", "not a reference file"),
        ('{"runs": [{}], "config": {"emb_size": 8}}', "runs/0"),
    ):
        other.write_text(text)
        with pytest.raises(UserError, match=reported):
            verify_file(other)
    run = {"prompt": [1], "out": [2], "temperature": 0.01}
    other.write_text(json.dumps({"runs": [run], "config": {"emb_size": 8}}))
    with pytest.raises(UserError, match="no model of its sizes"):
        verify_file(other)


@pytest.mark.slow
def test_a_checkpoint_of_other_sizes_is_understood(tmp_path: Path) -> None:
    """Eleven layers, three experts: read by the same way; zeros are not its logits."""
    write_release(tmp_path, CONFIG)
    sizes = {name: getattr(CONFIG, name) for name in ("n_vocab", "d_model", "d_k", "n_q_head", "n_kv_head", "n_layer")}
    sizes |= {name: getattr(CONFIG, name) for name in ("n_expert", "n_choice", "widening", "context")}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    tokens = np.arange(1, 9, dtype=np.int32).reshape(2, 4)
    arrays: dict[str, Any] = {"tokens": tokens, "f32/full_logits": np.zeros((2, 4, CONFIG.n_vocab), np.float32)}
    np.savez(tmp_path / "forward.npz", **arrays)
    assert failed(verify_file(tmp_path)) == ["f32/full_logits"]
