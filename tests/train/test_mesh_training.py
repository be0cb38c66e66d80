"""The same run on 1, 2, 4 and 8 devices: loss curve, evaluation, every leaf of the state, and what the model writes.

Sums over rows or cut widths are made in another order on a mesh, so figures are equal to rounding, not to the bit. The bounds are a
few float32 roundings (6e-8 each) after six updates; they are relative to the largest value of a leaf.
"""

from __future__ import annotations

from pathlib import Path

import mesh_runs
import pytest
import tiny

LOSS, STATE = 1e-6, 2e-5
SMALL = [
    ("vq", "data=2,fsdp=2,model=2"),
    ("moe", "data=2,model=2,expert=2"),
]
"""One head is that of tests/e2e/test_mesh_processes.py."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meshes")
    tiny.corpus(folder)
    mesh_runs.train_all(folder, [run for case, mesh in SMALL for run in ((case, ""), (case, mesh))], timeout=900)
    return folder


def assert_equal_runs(folder: Path, case: str, mesh: str) -> None:
    alone, spread = mesh_runs.run_folder(folder, case, ""), mesh_runs.run_folder(folder, case, mesh)
    curve = mesh_runs.losses(alone)
    assert len(curve) == mesh_runs.STEPS
    assert mesh_runs.losses(spread) == pytest.approx(curve, rel=LOSS, abs=0)
    assert mesh_runs.evaluations(spread) == pytest.approx(mesh_runs.evaluations(alone), rel=LOSS, abs=0)
    assert mesh_runs.samples(spread) == mesh_runs.samples(alone)
    difference, name = mesh_runs.largest_difference(mesh_runs.weights(alone), mesh_runs.weights(spread))
    assert difference < STATE, f"{name} differs by {difference:.1e}"


@pytest.mark.parametrize(("case", "mesh"), SMALL)
def test_run_on_eight_devices_equals_that_on_one(small: Path, case: str, mesh: str) -> None:
    assert_equal_runs(small, case, mesh)


@pytest.mark.trial
@pytest.mark.parametrize("case", mesh_runs.CASES)
def test_every_axis_alone_and_together_equals_one_device(tmp_path: Path, case: str) -> None:
    tiny.corpus(tmp_path)
    mesh_runs.train_all(tmp_path, [(case, mesh) for mesh in ("", *mesh_runs.ALL[case])], timeout=3600)
    for mesh in mesh_runs.ALL[case]:
        assert_equal_runs(tmp_path, case, mesh)
