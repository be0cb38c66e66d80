"""The real open_clip package with a small network of random weights. Needs the extra `clip`, but no download."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import png

from linnet.cli.dispatch import main
from linnet.core.errors import UserError
from linnet.data.encoders import open_encoder
from linnet.data.encoders.encoder import Encoder, encode_prompt

pytestmark = pytest.mark.trial
TEXTS = ["a red heart! wow", "cat", "!$"]
"""The last begins with token 0, which is padding too."""


def small(folder: Path, *, text_width: int = 32) -> Encoder:
    """An architecture of its own, registered as open_clip's users register theirs, with weights in a file."""
    package = pytest.importorskip("open_clip")
    torch = importlib.import_module("torch")
    name = f"linnet-{text_width}"
    vision = {"image_size": 32, "layers": 1, "width": 64, "head_width": 32, "patch_size": 16}
    text = {"context_length": 77, "vocab_size": 49408, "width": text_width, "heads": 2, "layers": 1}
    described = {"embed_dim": 32, "vision_cfg": vision, "text_cfg": text}
    (folder / f"{name}.json").write_text(json.dumps(described))
    package.add_model_config(folder)
    torch.manual_seed(0)
    model, _, _ = package.create_model_and_transforms(name, pretrained=None)
    torch.save(model.state_dict(), folder / f"{name}.pt")
    return open_encoder(f"open_clip:{name}/{folder / name}.pt")


def expected(encoder: Any, texts: list[str]) -> Any:
    """As the reference's adapter computes it."""
    torch = importlib.import_module("torch")
    tokens, found = encoder._tokenize(texts), []
    handle = encoder._model.ln_final.register_forward_hook(lambda module, inputs, output: found.append(output))
    with torch.no_grad():
        encoder._model.encode_text(tokens)
    handle.remove()
    before_end = (tokens == 49407).cumsum(dim=-1) == 0
    real = torch.nn.functional.pad(before_end, (1, -1), value=True) & (tokens != 0)
    return found[0].masked_fill(~real[..., None], 0.0).numpy()


def test_encodings_are_those_of_the_reference_adapter(tmp_path: Path) -> None:
    encoder = small(tmp_path)
    assert encoder.text_len == 77
    embeds, encodings = encoder.encode_texts(TEXTS)
    assert np.array_equal(encodings, expected(encoder, TEXTS))
    assert np.array_equal(embeds, encoder.embed_texts(TEXTS))
    assert [int(one.any(-1).sum()) for one in encodings] == [7, 3, 3]
    one, tokens = encode_prompt(encoder, TEXTS[0], with_encodings=True)
    assert tokens is not None
    np.testing.assert_allclose(tokens, encodings[0], atol=1e-5)
    np.testing.assert_allclose(one, embeds[0], atol=1e-5)


def test_model_of_two_widths_has_embeddings_only(tmp_path: Path) -> None:
    encoder = small(tmp_path, text_width=64)
    assert encoder.text_len == 0
    assert encoder.embed_texts(TEXTS).shape == (3, 32)
    with pytest.raises(UserError, match="64 wide and its embeddings 32"):
        encoder.encode_texts(TEXTS)


def test_photos_become_pairs_with_encodings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder, photos = small(tmp_path), tmp_path / "photos"
    photos.mkdir()
    for i, caption in enumerate(TEXTS):
        (photos / f"{i}.png").write_bytes(png(i))
        (photos / f"{i}.txt").write_text(caption)
    with pytest.raises(SystemExit) as exit:
        main(["data", "embed", str(photos), "--out", str(tmp_path / "out"), "--encoder", encoder.name])
    assert exit.value.code == 0
    assert "Token encodings: 77 positions of float16" in capsys.readouterr().out
    stored = np.load(tmp_path / "out" / "text_encodings" / "text_encodings_0.npy", mmap_mode="r")
    assert np.array_equal(stored, encoder.encode_texts(TEXTS).encodings.astype(np.float16))
