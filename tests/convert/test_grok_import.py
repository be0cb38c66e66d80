"""`linnet import grok-1` from the command line to a run that writes: the whole way, and all that ends it."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from grok_files import CONFIG, TINY_A, QuantizedWeight8bit, as_main, dump, write_release

from linnet.cli.dispatch import main as command
from linnet.core import quant
from linnet.models.moe import model as moe
from linnet.models.moe.config import MoEConfig
from linnet.runs.load import open_run
from linnet.tokenizers.load import open_tokenizer

CFG = dataclasses.replace(CONFIG, n_layer=2)


def main(argv: list[str]) -> int:
    """The exit code."""
    with pytest.raises(SystemExit) as ended:
        command(argv)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """As the released one: pad 0, begin 1, end 2, and all bytes."""
    import sentencepiece

    text = tmp_path / "words.txt"
    text.write_text("\n".join(f"a word and {i} more words of the sort" for i in range(200)))
    sentencepiece.SentencePieceTrainer.Train(
        input=str(text),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        byte_fallback=True,
        model_type="bpe",
        minloglevel=2,
    )
    return tmp_path / "tokenizer.model"


def same(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(x, y)


def release(folder: Path) -> dict[str, Any]:
    tensors = write_release(folder, CFG)
    (folder / "config.json").write_text(json.dumps({"config": dataclasses.asdict(CFG)}))
    return tensors


@pytest.mark.filterwarnings("ignore:numpy.core")
def test_tiny_a_becomes_a_run(tmp_path: Path, capsys: Any) -> None:
    assert main(["import", "grok-1", str(TINY_A), "--out", str(tmp_path / "run")]) == 0
    assert "linnet serve" in capsys.readouterr().out
    run = open_run(tmp_path / "run")
    assert (run.cfg.family, run.cfg.lm.n_vocab, run.step) == ("moe", 512, 0)
    with as_main():
        gate = pickle.loads((TINY_A / "ckpt-0" / "tensor00014_000").read_bytes())
    stored = run.params.layers.experts.gate
    np.testing.assert_array_equal(stored.weight[1], gate.weight)
    np.testing.assert_array_equal(stored.scales[1], gate.scales)


def test_imported_model_computes_what_the_released_code_computed(tmp_path: Path) -> None:
    assert main(["import", "grok-1", str(TINY_A), "--out", str(tmp_path / "run")]) == 0
    run, golden = open_run(tmp_path / "run"), np.load(TINY_A / "forward.npz")
    cfg = dataclasses.replace(run.cfg.model, dtype="float32")

    @jax.jit
    def logits(params: Any, tokens: Any) -> Any:
        return moe.logits(params, moe.forward(params, tokens, cfg)[0], cfg)  # pyright: ignore[reportArgumentType]

    np.testing.assert_allclose(logits(run.params, golden["tokens"]), golden["f32/full_logits"], atol=2e-5, rtol=0)


def test_out_and_back_through_a_conversion_is_exact(tmp_path: Path) -> None:
    release(tmp_path / "grok")
    assert main(["import", "grok-1", str(tmp_path / "grok"), "--out", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), "--format", "grok-hf"]) == 0
    settings = ["--settings", str(tmp_path / "grok" / "config.json")]
    again = ["import", "grok-1", str(tmp_path / "run-hf"), "--out", str(tmp_path / "again"), *settings]
    assert main(again) == 0
    first = open_run(tmp_path / "run").params
    one = lambda x: quant.dequantize(x) if quant.is_quantized(x) else x  # noqa: E731
    same(open_run(tmp_path / "again").params, jax.tree.map(one, first, is_leaf=quant.is_quantized))
    eight = ["import", "grok-1", str(tmp_path / "run-hf"), "--out", str(tmp_path / "eight"), "--weights", "int8"]
    assert main(eight) == 0
    made = open_run(tmp_path / "eight").params
    assert made.layers.w_q.weight.dtype == np.int8


def test_eight_bits_go_through_our_own_export(tmp_path: Path) -> None:
    release(tmp_path / "grok")
    assert main(["import", "grok-1", str(tmp_path / "grok"), "--out", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run")]) == 0
    assert main(["import", "safetensors", str(tmp_path / "run.safetensors"), "--out", str(tmp_path / "again")]) == 0
    same(open_run(tmp_path / "again").params, open_run(tmp_path / "run").params)
    assert open_run(tmp_path / "again").cfg == open_run(tmp_path / "run").cfg


def test_tokenizer_of_the_release_goes_with_the_run(tmp_path: Path, tokenizer: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    own = open_tokenizer(str(tokenizer))
    assert (own.eos_id, own.n_vocab, own.rules) == (2, 300, "exact")
    cfg = dataclasses.replace(CFG, n_vocab=300, end_id=5, begin_id=None)
    write_release(tmp_path / "grok", cfg)
    (tmp_path / "grok" / "config.json").write_text(json.dumps(dataclasses.asdict(cfg)))
    flags = ["--out", str(tmp_path / "run"), "--tokenizer", str(tokenizer)]
    assert main(["import", "grok-1", str(tmp_path / "grok"), *flags]) == 0
    run = open_run(tmp_path / "run")
    assert isinstance(run.cfg.model, MoEConfig)
    assert (run.cfg.model.end_id, run.cfg.model.pad_id) == (2, 0)
    text = "a word\nand é too".encode()
    ids = run.vocabulary.tokenizer.encode(text)
    released = SentencePieceProcessor(model_file=str(tokenizer))
    assert ids.tolist() == released.encode(text.decode()) != own.encode(text).tolist()
    assert run.vocabulary.tokenizer.decode(ids).decode() == released.decode(ids.tolist())
    assert run.vocabulary.tokenizer.fingerprint != own.fingerprint, "other ids for the same text"


def test_tokenizer_with_more_ids_than_the_model_is_rejected(tmp_path: Path, tokenizer: Path, capsys: Any) -> None:
    release(tmp_path / "grok")
    flags = ["--out", str(tmp_path / "run"), "--tokenizer", str(tokenizer)]
    assert main(["import", "grok-1", str(tmp_path / "grok"), *flags]) == 2
    assert "300" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_malicious_tensor_ends_the_import_before_anything_is_written(tmp_path: Path, capsys: Any) -> None:
    release(tmp_path / "grok")

    class Bomb:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'mark'}",)

    path = tmp_path / "grok" / "ckpt-0" / "tensor00025_000"  # the last
    assert path.exists()
    dump(Bomb(), path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["import", "grok-1", str(tmp_path / "grok"), "--out", str(tmp_path / "run")]) == 2
    assert "tensor00025_000" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_plan_writes_nothing(tmp_path: Path, capsys: Any) -> None:
    tensors = release(tmp_path / "grok")
    before = sorted(tmp_path.rglob("*"))
    assert main(["import", "grok-1", str(tmp_path / "grok"), "--plan"]) == 0
    count = sum((v.weight if isinstance(v, QuantizedWeight8bit) else v).size for v in tensors.values())
    assert f"{count:,}" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    assert main(["import", "grok-1", "--plan"]) == 0
    assert "318,239,886,140" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["grok-1", "nowhere", "--out", "run"], "contains no Grok-1 checkpoint"),
        (["grok-1", "--out", "run"], "FILE"),
        (["grok-1", "nowhere"], "--out"),
        (["transformer-vq", "--plan"], "--plan"),
    ],
)
def test_unsupported_checkpoints_are_rejected(
    tmp_path: Path, argv: list[str], words: str, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["import", *argv]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
