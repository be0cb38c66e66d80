"""Specs, random streams, pytrees and the mesh: what every family stands on."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiler_flags import simulated
from jax.sharding import AbstractMesh, PartitionSpec

from linnet.core import params, rng
from linnet.core.errors import UserError
from linnet.core.params import Spec
from linnet.core.pytree import named_leaves, pytree, replace, static
from linnet.core.quant import Quantized
from linnet.models.moe.params import RULES
from linnet.parallel.sharding import AxesTree, PSpecTree, make_mesh, open_mesh, partition, quantized_pspec, shardings


@pytree
class Toy:
    weight: Any
    bias: Any
    size: int = static(default=3)


def specs() -> Toy:
    return Toy(weight=Spec((4, 8, 64), ("layers", "model", "heads")), bias=Spec((8,), ("model",), "zeros"))


def test_leaves_have_names_and_static_fields_are_structure() -> None:
    toy = Toy(weight=1.0, bias={"a": 2.0, "b": (3.0,)})
    assert dict(named_leaves(toy)) == {"weight": 1.0, "bias/a": 2.0, "bias/b/0": 3.0}
    assert jax.tree.structure(toy) != jax.tree.structure(replace(toy, size=4))


def test_init_abstract_and_count_agree() -> None:
    made = params.init(specs(), rng.root(0))
    shapes = params.abstract(specs())
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(lambda s: s.shape, shapes)
    assert params.count(specs()) == 4 * 8 * 64 + 8


def test_fan_in_is_of_one_layer() -> None:
    made = params.init(specs(), rng.root(0))
    assert float(jnp.std(made.weight)) == pytest.approx(8**-0.5, rel=0.05)
    assert not np.any(made.bias)


def test_leaf_does_not_depend_on_the_others() -> None:
    alone = params.init({"weight": specs().weight}, rng.root(0))["weight"]
    assert np.array_equal(alone, params.init(specs(), rng.root(0)).weight)


def test_streams_differ_by_name_step_and_seed() -> None:
    keys = [
        rng.fold_in_name(rng.root(0), "a"),
        rng.fold_in_name(rng.root(0), "b"),
        rng.fold_in_name(rng.root(1), "a"),
        rng.fold_in(rng.fold_in_name(rng.root(0), "a"), 1),
    ]
    assert len({tuple(np.asarray(jax.random.key_data(k)).tolist()) for k in keys}) == 4


def test_streams_are_the_same_in_every_process() -> None:
    """Python's own hash is not: a resumed run would draw other numbers."""
    code = "import jax; from linnet.core import rng; print(jax.random.key_data(rng.fold_in_name(rng.root(7), 'params')).tolist())"
    reported = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(reported) == 1


def test_axis_that_does_not_divide_is_replicated() -> None:
    code = """
import jax
from linnet.core.params import Spec
from linnet.parallel.sharding import make_mesh, partition, shardings
rules = {"model": "fsdp", "heads": "model", "vocab": "model"}
mesh = make_mesh({"fsdp": 2, "model": 4})
assert partition((4, 8, 64), ("layers", "model", "heads"), mesh, rules) == jax.sharding.PartitionSpec(None, "fsdp", "model")
assert partition((259, 8), ("vocab", "model"), mesh, rules) == jax.sharding.PartitionSpec(None, "fsdp")
placed = jax.device_put(jax.numpy.ones((4, 8, 64)), shardings(Spec((4, 8, 64), ("layers", "model", "heads")), mesh, rules))
assert {s.data.shape for s in placed.addressable_shards} == {(4, 4, 16)}
print("fits")
"""
    flags = simulated(8, quickly=True)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=flags, check=False)
    assert done.stdout.strip() == "fits", done.stderr


@pytest.mark.parametrize(
    ("n_group", "groups"),
    [(1, None), (4, "model"), (8, "model"), (2, None), (6, None)],
)
def test_scales_of_8_bits_go_with_the_inputs_they_are_for(n_group: int, groups: str | None) -> None:
    """Four parts of the inputs: each has its own groups where they divide evenly, and all of them where they do not."""
    mesh = AbstractMesh((4, 2), ("model", "expert"))
    inputs, outputs = PartitionSpec("expert", "model", None), PartitionSpec("expert", None, "model")
    scales = PartitionSpec("expert", groups, None)
    assert quantized_pspec(inputs, n_group, mesh) == PSpecTree.of(Quantized, weight=inputs, scales=scales)
    assert quantized_pspec(outputs, 1, mesh) == PSpecTree.of(Quantized, weight=outputs, scales=outputs)


def test_trees_of_axes_are_known_by_their_leaves() -> None:
    axes, pspecs = (
        AxesTree.of(Quantized, weight=("model", None), scales=(None,)),
        PSpecTree.of(Quantized, weight=PartitionSpec(), scales=None),
    )
    assert isinstance(axes, AxesTree)
    assert not isinstance(axes, PSpecTree)
    assert not isinstance(pspecs, AxesTree)
    assert not isinstance(
        Quantized(weight=jnp.zeros((1, 1), jnp.int8), scales=jnp.zeros((1, 1), jnp.bfloat16)), AxesTree
    )


def test_mesh_of_one_device_shards_nothing() -> None:
    mesh = make_mesh()
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "model": 1, "expert": 1}
    placed = jax.device_put(params.init(specs(), rng.root(0)), shardings(specs(), mesh, RULES))
    assert placed.weight.shape == (4, 8, 64)
    assert len(partition(specs().weight.shape, specs().weight.axes, mesh, RULES)) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rows=2", "axes among data, fsdp, model, expert"),
        ("data=0", "a whole number from 1 on"),
        ("data", "write it as --mesh data=2"),
        ("data=2,data=2", "once"),
        ("data=4096", "devices"),
    ],
)
def test_impossible_mesh_is_rejected(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        open_mesh(text)
