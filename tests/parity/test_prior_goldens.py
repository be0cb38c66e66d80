"""The prior's reference files pass `linnet verify` at 1e-5; a wrong number in one is seen."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from linnet.core.errors import UserError
from linnet.verify import verify_file

pytestmark = pytest.mark.optimized

GOLDENS = Path(__file__).parents[1] / "goldens" / "prior"
FILES = sorted(GOLDENS.glob("*.npz"))
# One trainer (gradients too), and all that compiles fast. `make trials` takes every file.
QUICK = (
    "noise_tables",
    "ddim_times",
    "ema_scalar",
    "trainer_cosine_decay",
)


def check(path: Path) -> None:
    result = verify_file(path, tolerance=1e-5)
    assert result.checks
    assert [check for check in result.checks if not check.passed] == []
    assert [s.name for s in result.not_checked if not s.name.endswith("rotary_emb.freqs")] == []


@pytest.mark.parametrize("path", [p for p in FILES if p.stem in QUICK], ids=lambda p: p.stem)
def test_golden(path: Path) -> None:
    check(path)


@pytest.mark.trial
@pytest.mark.parametrize("path", [p for p in FILES if p.stem not in QUICK], ids=lambda p: p.stem)
def test_golden_trial(path: Path) -> None:
    check(path)


# Of the files that compile many networks, what one network computes.
SHARES = {
    "legacy_0.15.4": r"out/(version|enc.*)",
    "legacy_0.22.1": r"out/(version|enc.*)",
    "legacy_1.1.0_continuous": r"out/(version|enc.*)",
    "legacy_1.5.0": r"out/(version|enc.*)",
    "net_1.10.0": r"out/full.*",
    "net_1.10.9_self_cond": r"out/full.*",
    "net_base": r"out/full.*",
    "losses": r"out/loss/(l1/x_start|l2/noise|huber/v|l2/x_start)/enc",
    "sampling": r"out/(times/|n_noise/|)(ddpm|ddim5_eta1|ddim10_eta0|ddim10_eta0\.5)/noise/noenc",
}


@pytest.mark.parametrize("name", SHARES)
def test_a_share_of_a_long_golden(name: str, tmp_path: Path) -> None:
    full = np.load(GOLDENS / f"{name}.npz")
    kept = {n: full[n] for n in full.files if not n.startswith("out/") or re.fullmatch(SHARES[name], n)}
    np.savez(tmp_path / "share.npz", **kept)
    check(tmp_path / "share.npz")


def write(path: Path, kind: str, arrays: dict[str, Any], **config: Any) -> Path:
    np.savez(path, meta=json.dumps({"family": "prior", "kind": kind, "config": config}), **arrays)
    return path


def test_a_wrong_number_is_seen_and_an_unknown_one_is_told(tmp_path: Path) -> None:
    times = np.asarray([15, 11, 7, 3, -1])
    path = tmp_path / "times.npz"
    assert verify_file(write(path, "ddim_times", {"T20_k5": times})).passed
    result = verify_file(write(path, "ddim_times", {"T20_k5": np.where(times == 7, 8, times), "mystery": times}))
    assert not result.passed
    assert [s.name for s in result.not_checked] == ["mystery"]


def test_an_infinity_hides_no_error_beside_it(tmp_path: Path) -> None:
    from linnet.models.prior.schedule import tables

    good = tables("jsd", 30).sqrt_recip_alphas_cumprod
    assert np.isinf(good[-1])
    path = tmp_path / "tables.npz"
    assert verify_file(write(path, "noise_tables", {"jsd_30/sqrt_recip_alphas_cumprod": good})).passed
    for at in (3, -1):
        bad = good.copy()
        bad[at] = 2.0
        assert not verify_file(write(path, "noise_tables", {"jsd_30/sqrt_recip_alphas_cumprod": bad})).passed


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.npz"
    with pytest.raises(UserError, match="kind"):
        verify_file(write(path, "telepathy", {"x": np.zeros(2)}))
    with pytest.raises(UserError, match="'cosine_1000'"):
        verify_file(write(path, "noise_tables", {"steep_10/betas": np.zeros(10)}))
    with pytest.raises(UserError, match="learned_query"):
        verify_file(write(path, "network", {"out/noenc": np.zeros((1, 8))}, dim=8, depth=1, num_timesteps=10))


def test_nan_in_a_file_is_not_a_pass(tmp_path: Path) -> None:
    arrays = dict(np.load(GOLDENS / "ema_scalar.npz"))
    name = next(name for name in arrays if name.endswith("/ema_value"))
    arrays[name][1] = np.nan
    np.savez(tmp_path / "file.npz", **arrays)
    (failed,) = [check for check in verify_file(tmp_path / "file.npz").checks if not check.passed]
    assert failed.name == f"{name}: not finite"
