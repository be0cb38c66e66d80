"""`linnet serve` with priors: texts to embeddings with their nearest images, also if the run's data is missing."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_prior import model

from linnet.cli import main
from linnet.config.schema import PairsConfig, RunConfig
from linnet.data.encoders.builtin import open_builtin
from linnet.models.prior.config import PriorConfig
from linnet.runs.load import write_run

MODEL = PriorConfig(dim=256, depth=1, n_head=2, d_head=16, ff_mult=1, timesteps=64)


def served(folder: Path, runs: list[str], bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the responses of `linnet serve --batch`, which uses the same server without a port."""
    requests, answers = folder / "asks.jsonl", folder / "answers.jsonl"
    lines = [{"custom_id": str(i), "url": "/v1/priors/sample", "body": body} for i, body in enumerate(bodies)]
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SystemExit) as exit:
        main(["serve", *runs, "--slots", "2", "--batch", str(requests), str(answers)])
    assert not exit.value.code
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    return [one["response"] for one in sorted(found, key=lambda one: int(one["custom_id"]))]


def test_prior_is_served_with_and_without_its_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, source in (("whole", "emoji-pairs"), ("gone", str(tmp_path / "nowhere"))):
        write_run(
            tmp_path / name,
            RunConfig(family="prior", model=MODEL, data=PairsConfig(source=source)),
            model(MODEL),
            None,
        )
    vector = open_builtin().embed_texts(["red heart"])[0]
    words, same, plain, no_words, no_gallery = served(
        tmp_path,
        [str(tmp_path / "whole"), f"data-gone={tmp_path / 'gone'}"],
        [
            {"input": "red heart", "seed": 5, "n": 2, "steps": 8, "nearest": 3},
            {"embeddings": vector.tolist(), "seed": 5, "n": 2, "steps": 8, "guidance": 1.0},
            {"model": "data-gone", "embeddings": vector.tolist(), "seed": 5, "n": 2, "steps": 8},
            {"model": "data-gone", "input": "red heart"},
            {"model": "data-gone", "embeddings": vector.tolist(), "nearest": 3},
        ],
    )
    assert [one["status_code"] for one in (words, same, plain, no_words, no_gallery)] == [200, 200, 200, 400, 400]
    output = capsys.readouterr().err
    assert "data-gone: no gallery" in output
    assert "data-gone: the encoder of its data is unknown" in output
    assert "whole: 2 slots, embeddings of width 256." in output
    (result,) = words["body"]["data"]
    assert [one["seed"] for one in result["candidates"]] == [5, 6]
    # The same weights, text and seeds: the same bits, by words or by vector, whatever ran beside them.
    for other in (same, plain):
        assert other["body"]["data"][0]["candidates"] == result["candidates"]
    embedding = np.asarray(result["embedding"], np.float32)
    assert result["cosine"] == pytest.approx(float(embedding @ vector / np.linalg.norm(embedding)), abs=1e-5)
    assert [len(one["caption"]) > 3 for one in result["nearest"]] == [True] * 3
    assert result["nearest"][0]["cosine"] >= result["nearest"][2]["cosine"]
    image = Image.open(io.BytesIO(base64.b64decode(result["nearest"][0]["b64_json"])))
    assert image.size == (32, 32)
