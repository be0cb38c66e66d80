"""Plans of whole runs: the real update, compiled for devices that are not here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from linnet.cli.plan import plan_command
from linnet.config import codec, presets
from linnet.config.schema import DataConfig, OptimConfig, RunConfig
from linnet.core import params
from linnet.core.errors import UserError
from linnet.models import registry
from linnet.models.moe.config import MoEConfig
from linnet.models.vq.config import VQConfig
from linnet.plan import chips, formatting, planning, result, roofline, serving, sessions, tables
from linnet.plan.collectives import Collective
from linnet.plan.program import Program
from linnet.plan.result import DeviceMemory, TrainingPlan

VQ = RunConfig(
    model=VQConfig(d_model=64, d_k=16, d_v=64, n_head=2, n_code=32, n_layer=1, block_len=32, mem_len=32),
    data=DataConfig(sequence_len=128, update_len=64, batch_size=8),
)
MOE = RunConfig(
    family="moe",
    model=MoEConfig(
        d_model=64, d_k=16, n_q_head=4, n_kv_head=2, n_layer=2, n_expert=4, n_choice=2, widening=3.0, context=64
    ),
    data=DataConfig(sequence_len=64, update_len=64, batch_size=8),
)
N_PARAMS = params.count(registry.get("vq").param_specs(VQ.model))


@pytest.fixture(scope="module")
def plans() -> dict[str, TrainingPlan]:
    runs = {"fsdp": dataclasses.replace(VQ, mesh="fsdp=4"), "moe": MOE}
    return dict(zip(runs, planning.plan_in_subprocess(list(runs.values())), strict=True))


@pytest.mark.slow
def test_bytes_are_reported_by_kind_and_by_device(plans: dict[str, TrainingPlan]) -> None:
    memory = plans["fsdp"].memory
    assert memory.parameters == pytest.approx(4 * N_PARAMS / 4, rel=0.03), "biases and gains of other widths stay whole"
    assert memory.optimizer == pytest.approx(2 * memory.parameters, rel=0.01), "adamw keeps two of each"
    assert memory.batch == 4 * 4 * 8 * 64 / 4
    assert memory.carry > 0
    assert memory.average == 0
    assert memory.temporary > memory.parameters, "at least the gradients"
    assert memory.total == sum(dataclasses.asdict(memory).values())


def test_flops_of_the_program_are_those_of_the_familys_formula(plans: dict[str, TrainingPlan]) -> None:
    done = plans["fsdp"].program.flops * 4
    assert done == pytest.approx(plans["fsdp"].useful_flops, rel=0.06)


def test_sharded_weights_are_gathered_and_their_gradients_scattered(plans: dict[str, TrainingPlan]) -> None:
    sent = plans["fsdp"].program.sent_by_kind()
    cut = 4 * N_PARAMS * 3 / 4
    of_units = cut * params.count(registry.get("vq").param_specs(VQ.model).units) / N_PARAMS
    assert 2 * 0.95 * of_units <= sent["all-gather"] <= 2 * cut, "units for both passes, the vocabulary once or twice"
    assert 0.7 * cut <= sent["reduce-scatter"] <= cut, "what is small, or made from a sum, is summed whole"
    assert sent["all-reduce"] < 0.3 * cut


def test_loops_over_experts_count_at_an_even_load(plans: dict[str, TrainingPlan]) -> None:
    model: Any = MOE.model
    n_token, n_pair = 8 * 64, 8 * 64 * model.n_choice
    qk, hk = model.n_q_head * model.d_k, model.n_kv_head * model.d_k
    project = 3 * model.d_model * (2 * qk + 2 * hk) + 3 * model.d_model * model.n_expert
    attend = 3 * 2 * qk * 64
    experts = 11 * model.d_model * model.d_ffn  # 3 forward; backward 2 again, 1 and 2 for inputs, 3 for weights
    logits = 3 * model.d_model * model.n_vocab
    exact = 2 * (model.n_layer * (n_token * (project + attend) + n_pair * experts) + n_token * logits)
    assert plans["moe"].assumed_turns == n_pair / model.n_expert / 64
    assert plans["moe"].program.n_assumed == 2
    assert plans["moe"].program.flops == pytest.approx(exact, rel=0.02)


def test_plan_round_trips_through_json(plans: dict[str, TrainingPlan]) -> None:
    for plan in plans.values():
        assert result.from_json(json.loads(json.dumps(result.to_json(plan)))) == plan


def test_only_meshes_that_fit_a_run_are_enumerated() -> None:
    found = {run.mesh for run in planning.enumerate_meshes(VQ, 4)}
    assert found == {"data=4", "fsdp=4", "data=2,fsdp=2", "data=2,model=2", "fsdp=2,model=2"}
    assert "data=2,expert=2" in {run.mesh for run in planning.enumerate_meshes(MOE, 4)}
    assert planning.enumerate_meshes(VQ, 32) == []
    assert planning.with_enough_rows(VQ, 4) == VQ
    assert planning.with_enough_rows(VQ, 32).data.batch_size == 32
    with pytest.raises(UserError, match="--devices is 0"):
        planning.short_list(VQ, 0, 1e9)


def test_meshes_worth_compiling_are_those_whose_state_fits() -> None:
    grok = planning.with_enough_rows(presets.get("grok-1"), 256)
    assert grok.data.batch_size == 256
    listed = planning.short_list(grok, 256, 16e9)
    assert len(listed) == planning.SHORT_LIST
    for run in listed:
        cut = planning.parse_mesh(run.mesh)
        assert 2 * 4 * 315.7e9 / (cut["fsdp"] * cut["model"] * cut["expert"]) <= 16e9, run.mesh
    enwik8 = planning.short_list(presets.get("enwik8"), 8, 95e9)
    assert enwik8[0].mesh == "data=8", "nothing need be gathered where everything fits"


def made(mesh: str, total: float, sent: float, n_device: int = 4) -> TrainingPlan:
    memory = DeviceMemory(
        **dict.fromkeys((f.name for f in dataclasses.fields(DeviceMemory)), 0) | {"parameters": int(total)}
    )
    reduced = Collective(kind="all-gather", n_bytes=sent, group=tuple(range(n_device)))
    program = Program(flops=1e12, product_bytes=1e9, collectives={reduced: 1.0}, n_assumed=0)
    return TrainingPlan(
        mesh=mesh,
        n_device=n_device,
        rows=8,
        memory=memory,
        program=program,
        useful_flops=3e12,
        dtype="bfloat16",
        compiled_mesh=None,
        assumed_turns=None,
    )


def test_fitting_mesh_with_the_least_communication_is_recommended() -> None:
    chip = chips.get("tpu-v5e")
    plans = [made("data=4", 20e9, 1e6), made("fsdp=4", 10e9, 9e9), made("data=2,fsdp=2", 15e9, 4e9)]
    best = planning.recommended(plans, chip, 16e9)
    assert best is not None
    assert best.mesh == "data=2,fsdp=2"
    assert planning.recommended(plans, chip, 5e9) is None


def test_suggestions_are_given_when_no_mesh_fits() -> None:
    words = planning.suggestions(VQ, [made("data=4", 20e9, 1e6)], 16e9)
    assert words == [
        "more devices: the training state alone, 80 GB, needs 8 of them, sharded by fsdp",
        "--model.remat full: recompute activations instead of storing them",
        "--train.accumulate 2: one row per device at a time",
        "a mesh with fsdp instead of data: weights are sharded, not replicated",
    ]


def test_longest_of_three_times_bounds_a_step() -> None:
    chip = dataclasses.replace(chips.get("h100"), bf16_flops=1e12, hbm_bandwidth=1e9, link=1e9, network=1e8, domain=2)
    times = roofline.times(made("data=4", 0, 4e9).program, 1e9, chip, "bfloat16")
    assert times.compute == 1.0
    assert times.memory == 1.0 + 2.0
    # Within pairs a device gets half of the whole; half of its pair's half comes from the other pair.
    assert times.communication == pytest.approx(4e9 / 2 / 1e9 + 4e9 / 2 / 2 / 1e8)
    assert times.bound == "communication"
    assert roofline.share_of_peak(3e12, 4, times.step, chip, "bfloat16") == pytest.approx(3 / 4 / times.step)


def test_presets_are_planned_on_meshes_that_they_accept() -> None:
    for preset in tables.PRESETS:
        for n in tables.DEVICES:
            assert planning.n_devices(planning.parse_mesh(tables.weak(preset, n).mesh)) == n
    assert [tables.strong("grok-1", n) is None for n in tables.DEVICES] == [False, False, False, True, True, True]
    last = tables.strong("enwik8", 4096)
    assert last is not None
    assert (last.mesh, last.data.batch_size) == ("data=128,model=32", 128)


def test_serving_is_planned_from_shapes() -> None:
    grok = dataclasses.replace(presets.get("grok-1"), mesh="model=8")
    plan = serving.plan_serving(grok, "int8")
    assert 316.6e9 / 8 <= plan.weight_bytes <= 1.02 * 316.6e9 / 8
    keys = 2 * 64 * 8 * 128 * 2  # layers, heads, width, two bytes; keys and values
    assert plan.session_bytes == 8192 * (keys + 4)
    assert plan.slot_bytes == pytest.approx((8192 + 128) * keys / 8, rel=0.01)
    assert plan.n_slot(39e9) == 0
    assert plan.n_slot(plan.weight_bytes + 10.5 * plan.slot_bytes) == 10
    with pytest.raises(UserError, match="leave data out"):
        serving.plan_serving(dataclasses.replace(presets.get("pg19"), mesh="data=2"), "bfloat16")


def test_state_of_constant_size_costs_the_same_to_move_whatever_was_read() -> None:
    plan = serving.plan_serving(presets.get("enwik8"), "bfloat16")
    assert plan.session_bytes == plan.short_session_bytes
    chip = chips.get("h100")
    found = sessions.traffic(plan, chip, "bfloat16")
    assert found is not None
    assert found.sessions == plan.n_slot(80e9)
    assert found.move == plan.session_bytes / 50e9
    assert found.turns == pytest.approx(found.sessions / (sessions.TURN * found.tick))
    assert plan.read_bytes < plan.weight_bytes, "prompts are read by the other copy"
    assert found.tick >= (plan.read_bytes + found.sessions * plan.slot_bytes) / chip.hbm_bandwidth


def test_sizes_are_parsed_and_formatted_with_units() -> None:
    assert formatting.parse_size("16GB", "--hbm") == 16e9
    assert formatting.parse_size("80 GiB", "--hbm") == 80 * 2**30
    assert formatting.parse_size("8e10", "--hbm") == 8e10
    for text in ("many", "16 apples", "0GB", "1.2.3GB"):
        with pytest.raises(UserError, match="--hbm"):
            formatting.parse_size(text, "--hbm")
    assert formatting.format_bytes(1.234e9) == "1.23 GB"
    assert formatting.format_bytes(1.2345e15) == "1,234 TB"
    assert formatting.format_seconds(0.0123) == "12.3 ms"


def test_command_rejects_incompatible_runs(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    codec.save(VQ, path)
    with pytest.raises(UserError, match=r"--devices is 8.*as many as the mesh has \(4\)"):
        plan_command([str(path), "--mesh", "data=4", "--devices", "8"])
    with pytest.raises(UserError, match="--devices is 0.*at least 1"):
        plan_command([str(path), "--devices", "0"])
    with pytest.raises(UserError, match="--chip is 'abacus'"):
        plan_command([str(path), "--chip", "abacus"])


@pytest.mark.trial
def test_command_finds_a_mesh_and_says_what_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    codec.save(dataclasses.replace(VQ, optim=OptimConfig(name="adafactor")), path)
    assert plan_command([str(path), "--devices", "2", "--hbm", "1GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {plan["mesh"] for plan in found["plans"]} == {"data=2", "fsdp=2", "model=2"}
    assert found["recommended"]["mesh"] in ("data=2", "fsdp=2", "model=2")
    assert plan_command([str(path), "--compare-remat", "--hbm", "1MB"]) == 0
    output = capsys.readouterr().out
    assert "It does not fit in 1 MB" in output
    assert "What would fit:" in output


@pytest.mark.trial
def test_large_mesh_is_planned_from_a_part_of_it() -> None:
    """The same per device on 4,096 devices as on the 2,048 that were compiled."""
    large = dataclasses.replace(VQ, mesh="data=4096", data=dataclasses.replace(VQ.tokens, batch_size=4096))
    half = dataclasses.replace(VQ, mesh="data=2048", data=dataclasses.replace(VQ.tokens, batch_size=2048))
    (of_large,), (of_half,) = planning.plan_in_subprocess([large]), planning.plan_in_subprocess([half])
    assert of_large.compiled_mesh == "data=2048"
    assert of_large.memory == of_half.memory
    assert of_large.program.flops == of_half.program.flops
    assert of_large.program.sent() == pytest.approx(of_half.program.sent() * (4095 / 4096) / (2047 / 2048))
