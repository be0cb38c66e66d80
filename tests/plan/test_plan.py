"""Reading compiled programs: loops count as often as they run, collectives by what they carry and between whom."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from linnet.plan import collectives, hlo, program
from linnet.plan.collectives import Collective


def compiled(f: Any, *shapes: tuple[int, ...]) -> Any:
    return jax.jit(f).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()


def by_scan(x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def unrolled(x: Any, w: Any) -> Any:
    for i in range(w.shape[0]):
        x = jnp.tanh(x @ w[i])
    return x


def test_loop_counts_as_often_as_it_runs() -> None:
    shapes = ((32, 48), (7, 48, 48))
    exact = 7 * 2 * 32 * 48 * 48
    scan = compiled(by_scan, *shapes)
    assert program.read(scan.as_text()).flops == exact
    assert program.read(compiled(unrolled, *shapes).as_text()).flops == exact
    assert scan.cost_analysis()["flops"] < exact / 3, "XLA's own count has learnt to count loops: use it"


def test_products_agree_with_the_compilers_count_where_nothing_loops() -> None:
    full = compiled(lambda a, b, c: jnp.einsum("bij,bjk->bik", a, b) @ c, (3, 64, 32), (3, 32, 80), (80, 48))
    ours, theirs = program.read(full.as_text()).flops, full.cost_analysis()["flops"]
    assert ours == 2 * 3 * 64 * 32 * 80 + 2 * 3 * 64 * 80 * 48
    assert ours == pytest.approx(theirs, rel=0.01)


def test_loops_within_loops_multiply() -> None:
    def f(x: Any, w: Any) -> Any:
        return jax.lax.fori_loop(0, 5, lambda _, x: by_scan(x, w), x)

    assert program.read(compiled(f, (16, 32), (3, 32, 32)).as_text()).flops == 5 * 3 * 2 * 16 * 32 * 32


def test_loop_that_the_data_decide_on_is_never_counted_silently() -> None:
    def f(n: Any, x: Any, w: Any) -> Any:
        return jax.lax.fori_loop(0, n.astype(jnp.int32), lambda _, x: jnp.tanh(x @ w), x)

    text = compiled(f, (), (16, 32), (32, 32)).as_text()
    with pytest.raises(program.UnknownTrips, match="data-dependent trip count"):
        program.read(text)
    assumed = program.read(text, trips=lambda _: 12.5)
    assert assumed.flops == 12.5 * 2 * 16 * 32 * 32
    assert assumed.n_assumed == 1


def test_of_two_branches_the_longer_one_counts() -> None:
    def f(x: Any, w: Any) -> Any:
        return jax.lax.cond(x[0, 0] > 0, lambda x: unrolled(x, w), lambda x: x @ w[0], x)

    assert program.read(compiled(f, (16, 32), (3, 32, 32)).as_text()).flops == 3 * 2 * 16 * 32 * 32


def test_groups_are_read_in_all_three_layouts() -> None:
    first = collectives._first_group
    assert first("{{0,2}") == (0, 2)  # the rest of the list is not looked at
    assert first("[2,4]<=[8]") == (0, 1, 2, 3)
    assert first("[4,2]<=[2,4]T(1,0)") == (0, 4)
    assert first("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}") == (0, 1, 2, 3)
    assert first("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}") == (0, 4)
    assert first("mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}") == tuple(range(8))
    assert first("mesh['axis_0'=1,'axis_1'=2,'axis_2'=4], device_ids=([4,2]T(1,0)) {'axis_1'}") == (0, 1)
    assert first("mesh['axis_0'=1,'axis_1'=2,'axis_2'=4], device_ids=([4,2]T(1,0)) {'axis_2'}") == (0, 2, 4, 6)
    assert first("mesh['axis_0'=8] {'axis_0':(2)2}") == (0, 2)


def test_unreadable_groups_are_not_treated_as_absent() -> None:
    text = """
ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %all = f32[8]{0} all-reduce(%p), channel_id=3, replica_groups=anew{0}, to_apply=%add
}
"""
    with pytest.raises(AssertionError, match="unknown notation"):
        program.read(text)


def test_tuple_instructions_are_parsed_completely() -> None:
    text = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %r = f32[] add(%a, %b)
}

ENTRY %main (p: f32[8,4]) -> (f32[8,4], bf16[2]) {
  %p = f32[8,4]{1,0} parameter(0)
  %q = bf16[2]{0} constant({1, 2})
  ROOT %all = (f32[8,4]{1,0}, /*index=1*/bf16[2]{0}) all-reduce(%p, /*index=1*/%q), channel_id=3, replica_groups=[2,4]<=[8]
}
"""
    module = hlo.parse(text)
    one = module.computations["main"].instructions["all"]
    assert one.shapes == (hlo.Shape("f32", (8, 4)), hlo.Shape("bf16", (2,)))
    assert one.operands == ("p", "q")
    assert one.text("channel_id") == "3"
    assert program.read(text).collectives == {
        Collective(kind="all-reduce", n_bytes=8 * 4 * 4 + 2 * 2, group=(0, 1, 2, 3)): 1.0
    }


SUMMED = """
%fused (a: f32[16], at: s32[]) -> f32[4] {
  %a = f32[16]{0} parameter(0)
  %at = s32[] parameter(1)
  %same = f32[16]{0} bitcast(%a)
  ROOT %cut = f32[4]{0} dynamic-slice(%same, %at), dynamic_slice_sizes={4}
}

ENTRY %main (p: f32[16], at: s32[]) -> (f32[4], f32[16]) {
  %p = f32[16]{0} parameter(0)
  %at = s32[] parameter(1)
  %sum = (f32[16]{0}, f32[16]{0}) all-reduce(%p, %p), channel_id=3, replica_groups=[2,4]<=[8], to_apply=%add
  %one = f32[16]{0} get-tuple-element(%sum), index=0
  %two = f32[16]{0} get-tuple-element(%sum), index=1
  %mine = f32[4]{0} fusion(%one, %at), kind=kLoop, calls=%fused
  %other = f32[READ]{0} dynamic-slice(%two, %at), dynamic_slice_sizes={READ}
  ROOT %both = (f32[4]{0}, f32[READ]{0}) tuple(%mine, %other)
}
"""


def test_sum_of_which_each_keeps_its_part_counts_as_scattered() -> None:
    def kinds(text: str) -> dict[str, float]:
        return {one.kind: one.n_bytes for one in program.read(text).collectives}

    assert kinds(SUMMED.replace("READ", "4")) == {"reduce-scatter": 128.0}
    assert kinds(SUMMED.replace("READ", "8")) == {"reduce-scatter": 64.0, "all-reduce": 64.0}


def test_bytes_sent_per_device_follow_from_kind_and_group() -> None:
    def sent(kind: Any, n_device: int, domain: float) -> tuple[float, float]:
        return Collective(kind=kind, n_bytes=800.0, group=tuple(range(n_device))).sent_by_level(domain)

    assert sent("all-reduce", 8, 8) == (2 * 700.0, 0.0)
    assert sent("all-gather", 8, 8) == sent("reduce-scatter", 8, 8) == (700.0, 0.0)
    # Two servers of four: each device passes on a quarter of the sum.
    assert sent("all-reduce", 8, 4) == (2 * 600.0, 2 * 100.0)
    assert sent("all-to-all", 8, 4) == (300.0, 400.0)
    separate = Collective(kind="all-reduce", n_bytes=800.0, group=(0, 4))
    assert separate.sent_by_level(4) == (0.0, 800.0)


MESH = """
import json
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from linnet.plan import program
from linnet.plan.compiling import compile_for_reading, use_fake_devices

use_fake_devices(8)

def step(params, x):
    def loss(params):
        def layer(x, p):
            w, v = p
            return x + jnp.tanh(x @ w.astype(x.dtype)) @ v.astype(x.dtype), None
        return jnp.mean(jax.lax.scan(layer, x, params)[0].astype(jnp.float32))
    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

def read(data, model, rows, dtype):
    mesh = jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: data * model])
    def array(shape, dtype, *cuts):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*cuts)))
    params = (array((3, 64, 128), jnp.float32, None, None, "model"), array((3, 128, 64), jnp.float32, None, "model", None))
    x = array((rows, 64), dtype, "data")
    jitted = jax.jit(step, out_shardings=jax.tree.map(lambda p: p.sharding, params))
    return compile_for_reading(jitted.lower(params, x))

out = {}
for dtype in ("float32", "bfloat16"):
    for data, rows in ((2, 64), (4, 128)):
        c = read(data, 2, rows, dtype)
        p = program.read(c.text, partitioned_hlo=c.partitioned_hlo)
        if data == 2:
            p = program.on_more_rows(p, 4, 2, 2)
        out[f"{dtype} {data}"] = {
            "flops": p.flops,
            "collectives": sorted([c.kind, c.n_bytes, list(c.group), n] for c, n in p.collectives.items()),
        }
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def on_meshes() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", MESH], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_collectives_of_a_partitioned_program_are_as_expected(on_meshes: dict[str, Any]) -> None:
    found = on_meshes["float32 4"]
    rows, wide, hidden = 32, 64, 64
    activations, weights = rows * wide * 4, wide * hidden * 4
    assert found["collectives"] == [
        ["all-reduce", activations, [0, 1], 6.0],  # one a layer each way
        ["all-reduce", 2 * weights, [0, 2, 4, 6], 3.0],  # a layer's gradients
    ]
    assert found["flops"] == 3 * 6 * 2 * rows * wide * hidden


def test_upcasts_of_this_machine_are_counted_in_the_models_dtype(on_meshes: dict[str, Any]) -> None:
    def total(dtype: str) -> float:
        return sum(size * n for _, size, _, n in on_meshes[f"{dtype} 4"]["collectives"])

    assert total("bfloat16") == total("float32") / 2


def test_larger_mesh_follows_from_a_smaller_one_of_equal_parts(on_meshes: dict[str, Any]) -> None:
    for dtype in ("float32", "bfloat16"):
        assert on_meshes[f"{dtype} 2"] == on_meshes[f"{dtype} 4"]
