"""Decoding on a mesh equals one device: tokens, log-probabilities within a rounding, and states that travel between both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoint_mesh as cm
import pytest
import tiny

from linnet.config import codec
from linnet.core.errors import UserError
from linnet.models.tensor_parallel import check_serving
from linnet.parallel import mesh as meshes
from linnet.runs.load import decoding_mesh

TOLERANCE = 1e-5
"""Of log-probabilities, relative: sums over axes that are cut are rounded otherwise."""

ALL = [
    ("one head", ["model=2", "model=4"], "float32"),
    ("heads", ["model=2", "model=4"], "float32"),
    ("experts", ["model=2", "expert=4", "model=2,expert=4", "model=4,expert=2"], "float32"),
    ("moe", ["model=2", "expert=2", "model=4", "expert=4", "model=4,expert=2"], "float32"),
    ("one head", ["model=2"], "int8"),
    ("experts", ["model=2,expert=2"], "int8"),
    ("moe", ["model=2,expert=2"], "int8"),
    ("moe", ["model=2,expert=2"], "bfloat16"),
]


def ask(cases: list[Any], timeout: float) -> list[dict[str, Any]]:
    script = "import sys, decode_mesh; decode_mesh.main(sys.argv[1])"
    reported = cm.alone(8, script, json.dumps(cases), timeout=timeout)
    assert len(reported) == sum(len(texts) for _, texts, _ in cases)
    return reported


def n_sums(name: str) -> int:
    """The embedding's, and one for what every half of a layer adds: two units, with experts each with a mixture; or two layers."""
    return {"one head": 3, "heads": 3, "experts": 5, "moe": 3}[name]


def check(reported: dict[str, Any]) -> None:
    where = f"{reported['name']} on {reported['mesh']}"
    sizes = meshes.parse_mesh(reported["mesh"])
    assert reported["tokens"], f"{where}: other tokens than one device"
    assert reported["difference"] < TOLERANCE, where
    assert reported["alone"], f"{where}: a slot's bits depend on its neighbours"
    assert reported["parked"], f"{where}: a slot that was stopped continued with other bits"
    assert reported["journey"], f"{where}: a state that left the mesh and came back continued otherwise"
    # Nothing moves between devices but hidden vectors and logits: of three slots, 32 wide.
    made = reported["collectives"]
    by_model = sizes["model"] > 1
    assert made.keys() <= {"all-reduce", "all-gather"}, f"{where}: {made}"
    assert len(made.get("all-gather", [])) == by_model
    assert all(size <= 3 * 32 * 4 for kind in made.values() for size in kind), f"{where}: {made}"
    if by_model:
        assert len(made["all-reduce"]) == n_sums(reported["name"]), f"{where}: {made}"
        assert reported["slot_bytes"] < 0.55 * reported["whole_slot_bytes"]
    assert reported["weight_bytes"] < 0.9 * reported["whole_weight_bytes"]


@pytest.mark.parametrize("name", [pytest.param("experts", marks=[pytest.mark.optimized, pytest.mark.slow]), "moe"])
def test_decoding_on_a_mesh_equals_one_device(name: str) -> None:
    """Several heads: see the two processes below."""
    (reported,) = ask([(name, ["model=2,expert=2"], "float32")], timeout=400)
    check(reported)


@pytest.mark.trial
@pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case[0]} {case[2]}")
def test_decoding_on_every_mesh_equals_one_device(case: Any) -> None:
    for reported in ask([case], timeout=1800):
        check(reported)


SAMPLE = """
import sys
from pathlib import Path
import jax
import checkpoint_mesh as cm
import decode_mesh

words = decode_mesh.sample_in_run(Path(sys.argv[1]), *sys.argv[2:])
cm.say(words=words, process=jax.process_index())
"""


def in_run_samples(folder: Path, name: str, texts: list[str]) -> None:
    (alone,) = cm.alone(1, SAMPLE, str(folder / "alone"), name, "", timeout=600)
    ends = cm.cluster(2, SAMPLE, str(folder / "both"), name, *texts, timeout=600)
    for code, reported, complaint in ends:
        assert code == 0, complaint
        assert reported[0]["words"] == alone["words"] * len(texts), "processes together wrote something else"
    written = sorted((folder / "both").iterdir())
    assert len(written) == len(texts), "the first process writes, and no other"
    assert all(file.read_text() == alone["words"][0] for file in written)


@pytest.mark.slow
def test_two_processes_write_the_sample_of_one(tmp_path: Path) -> None:
    in_run_samples(tmp_path, "heads", ["model=2"])


@pytest.mark.trial
@pytest.mark.parametrize("name", ["one head", "experts", "moe"])
def test_two_processes_write_the_sample_of_one_on_every_mesh(tmp_path: Path, name: str) -> None:
    in_run_samples(
        tmp_path, name, ["data=2", "fsdp=2", "model=2", *(["expert=2"] if name in ("experts", "moe") else [])]
    )


COMMANDS = """
import sys
from pathlib import Path
import checkpoint_mesh as cm
import decode_mesh

cm.say(**decode_mesh.outputs_of_commands(Path(sys.argv[1]), *sys.argv[2:]))
"""


@pytest.mark.trial
@pytest.mark.parametrize(("name", "text"), [("one head", "model=2"), ("moe", "model=2,expert=2")])
def test_commands_print_the_same_on_a_mesh(tmp_path: Path, name: str, text: str) -> None:
    (output,) = cm.alone(4, COMMANDS, str(tmp_path), name, text, timeout=1200)
    for alone, on_mesh in (output["sample"], output["serve"]):
        assert alone == on_mesh
        assert all(len(words) > 20 for words in alone)


@pytest.mark.parametrize(("text", "fix"), [("fsdp=2", "leave fsdp out"), ("data=2,model=2", "--replicas")])
def test_mesh_that_makes_no_sense_for_serving_is_rejected(text: str, fix: str) -> None:
    with pytest.raises(UserError, match=fix):
        check_serving(meshes.parse_mesh(text), "--mesh", text)


def test_mesh_that_does_not_divide_the_model_is_rejected_before_loading(tmp_path: Path) -> None:
    codec.save(tiny.config(tmp_path), tmp_path / "config.json")
    assert decoding_mesh(tmp_path, "") is None
    with pytest.raises(UserError, match=r"n_head.*use --mesh model=2"):
        decoding_mesh(tmp_path, "model=3")
    with pytest.raises(UserError, match="1 for a model without experts"):
        decoding_mesh(tmp_path, "expert=2")
