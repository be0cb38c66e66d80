"""`linnet verify` on an official Transformer-VQ checkpoint with what the official code computed from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from linnet.convert.flax import read_flax, write_flax
from linnet.core.errors import UserError
from linnet.verify import Verification, verify_file

OFFICIAL = Path(__file__).parents[1] / "goldens" / "vq" / "official"


def failed(result: Verification) -> list[str]:
    return [check.name for check in result.checks if not check.passed]


def test_all_values_of_the_folder_are_reported() -> None:
    result = verify_file(OFFICIAL)
    assert failed(result) == []
    assert len(result.checks) == 10
    assert not result.not_checked
    errors = {check.name: check.error for check in result.checks}
    assert errors["loss_nats_per_byte"] < 1e-6


def copy(folder: Path, **changes: Any) -> Path:
    made = folder / "official"
    shutil.copytree(OFFICIAL, made)
    values = json.loads((made / "official.json").read_text())
    (made / "official.json").write_text(json.dumps({**values, **changes}))
    return made


def test_wrong_weight_or_length_is_seen(tmp_path: Path) -> None:
    made = copy(tmp_path)
    tree = read_flax(made / "checkpoint_30")
    kernel = tree["params"]["transformer_layers_1"]["scanned_attn2"]["res_proj"]
    kernel["kernel"] = np.array(kernel["kernel"]) * np.float32(1.01)
    write_flax(made / "checkpoint_30", tree)
    wrong = failed(verify_file(made / "official.json"))
    assert "loss_nats_per_byte" in wrong
    assert "first_logprobs.npz: after_prompt_1" in wrong
    shutil.rmtree(made)
    values = json.loads((OFFICIAL / "official.json").read_text())
    values["continuations"][2]["ids"][5] += 1
    made = copy(tmp_path, sequence_len=256, heldout_sequences=8, continuations=values["continuations"])
    (made / "first_logprobs.npz").unlink()
    result = verify_file(made)
    assert failed(result) == ["loss_nats_per_byte", "continuations/2"]
    assert [skipped.name for skipped in result.not_checked] == ["first_logprobs.npz"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checkpoint": "../checkpoint_30"}, "a file beside it"),
        ({"args": None}, "its settings"),
        ({"heldout": "none.txt"}, "cannot be read"),
        ({"heldout_sequences": 9}, "fewer than 9 sequences"),
        ({"continuations": [{"prompt": 3}]}, "a prompt and ids"),
    ],
)
def test_folder_that_is_incomplete_is_rejected(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        verify_file(copy(tmp_path, **changes))
