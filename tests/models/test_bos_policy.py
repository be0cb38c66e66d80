"""The begin-of-sequence policy: in the config, in old files, in exports, and in what a model trains on and is evaluated on."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from grok_files import CONFIG, GOLDENS, write_release

from linnet.cli.dispatch import main as command
from linnet.config import codec
from linnet.config.schema import DataConfig, RunConfig
from linnet.core import params as weights
from linnet.core.errors import UserError
from linnet.data import load_dataset
from linnet.data.prepare.chunks import ChunkItem
from linnet.data.prepare.shards import TextEncoder
from linnet.evaluate.language_model import evaluate
from linnet.generate.samples import sample_text
from linnet.models import registry
from linnet.models.generate import generate
from linnet.models.moe import model as moe
from linnet.models.moe.config import MoEConfig
from linnet.models.vq.config import VQConfig
from linnet.nn.sampling import sampling_settings
from linnet.runs.load import open_run
from linnet.runs.vocabulary import Vocabulary
from linnet.serve.state import model_fingerprint
from linnet.tokenizers.base import SETTINGS_FILE
from linnet.tokenizers.load import open_tokenizer

TOKENIZER = GOLDENS / "e2e_A_tokenizer.model"


def linnet(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        command(list(argv))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def load(folder: Path) -> Any:
    return codec.load(folder / "config.json").model


def forget(folder: Path) -> None:
    """The run as an earlier version wrote it."""
    values = json.loads((folder / "config.json").read_text())
    del values["model"]["begin_id"]
    (folder / "config.json").write_text(json.dumps(values))
    (folder / SETTINGS_FILE).unlink(missing_ok=True)


@pytest.mark.parametrize("kind", [VQConfig, MoEConfig])
def test_model_states_an_id_or_none(kind: Any) -> None:
    assert (kind().bos_id, kind(end_id=5).bos_id) == (1, 5)
    assert (kind(begin_id=None).bos_id, kind(begin_id=7, end_id=5).bos_id) == (None, 7)
    with pytest.raises(UserError, match=r"begin_id.*999"):
        kind(begin_id=999)
    for given in ("end", None, 7):
        values = {**dataclasses.asdict(kind()), "begin_id": given}
        assert codec.from_dict(kind, values, "model.").begin_id == given
    with pytest.raises(UserError, match="begin_id"):
        codec.from_dict(kind, {"begin_id": "start"}, "model.")
    assert codec.from_dict(kind, {}, "model.").bos_id == 1, "configs from before there was a choice"


def test_saved_sessions_belong_to_the_same_model_as_before() -> None:
    """A fingerprint is over the config's text: it must not change by a setting that changes nothing a state means."""
    one = {"w": np.zeros(3, np.float32)}
    for begin in ("end", None, 3):
        assert model_fingerprint(one, {}, VQConfig(begin_id=begin)) == model_fingerprint(one, {}, VQConfig())
    assert "begin_id" not in repr(VQConfig()) + repr(MoEConfig())


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """Of the published layout, with the sizes of the test's tokenizer and nothing said about a begin id."""
    cfg = dataclasses.replace(CONFIG, n_vocab=512, n_layer=2)
    write_release(tmp_path / "grok", cfg)
    values = {name: value for name, value in dataclasses.asdict(cfg).items() if name != "begin_id"}
    (tmp_path / "grok" / "config.json").write_text(json.dumps(values))
    return tmp_path / "grok"


def test_import_has_none_and_keeps_it_through_exports(release: Path, tmp_path: Path) -> None:
    run, named = tmp_path / "run", ["--tokenizer", str(TOKENIZER)]
    assert linnet("import", "grok-1", str(release), *named, "--out", str(run)) == 0
    assert (load(run).begin_id, load(run).end_id) == (None, 2)
    assert open_tokenizer(str(run)).rules == "released"
    assert linnet("export", str(run)) == 0
    assert linnet("import", "safetensors", f"{run}.safetensors", *named, "--out", str(tmp_path / "again")) == 0
    assert load(tmp_path / "again").begin_id is None
    assert open_run(tmp_path / "again").vocabulary.tokenizer.fingerprint == open_tokenizer(str(run)).fingerprint
    assert linnet("export", str(run), "--format", "grok-hf") == 0
    assert linnet("import", "grok-1", f"{run}-hf", *named, "--out", str(tmp_path / "hf")) == 0
    assert load(tmp_path / "hf").begin_id is None
    assert open_tokenizer(str(tmp_path / "hf")).rules == "released"


@pytest.mark.parametrize(("flag", "wanted"), [("end", 2), ("none", None), ("1", 1)])
def test_import_accepts_a_condition(release: Path, tmp_path: Path, flag: str, wanted: int | None) -> None:
    run = tmp_path / "run"
    assert linnet("import", "grok-1", str(release), "--begin-id", flag, "--out", str(run)) == 0
    assert load(run).bos_id == wanted
    assert linnet("export", str(run)) == 0
    assert linnet("import", "safetensors", f"{run}.safetensors", "--out", str(tmp_path / "again")) == 0
    assert load(tmp_path / "again").bos_id == wanted


def test_import_by_an_earlier_version_reads_as_the_release(release: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert linnet("import", "grok-1", str(release), "--tokenizer", str(TOKENIZER), "--out", str(run)) == 0
    assert linnet("export", str(run)) == 0
    forget(run)
    assert load(run).begin_id is None
    assert open_run(run).vocabulary.tokenizer.rules == "released"
    # Trained on by that version, it was trained with the end id in front and with exact ids.
    (run / "checkpoints" / "20").mkdir(parents=True)
    assert load(run).bos_id == 2
    assert open_tokenizer(str(run)).rules == "exact"


def test_run_of_our_own_keeps_its_meaning(tmp_path: Path) -> None:
    codec.save(RunConfig(), tmp_path / "config.json")
    (tmp_path / "tokenizer.model").write_bytes(TOKENIZER.read_bytes())
    forget(tmp_path)
    assert load(tmp_path).bos_id == 1
    assert open_tokenizer(str(tmp_path)).rules == "exact"


def data_of(text: bytes, folder: Path, length: int, begin: int | None) -> Any:
    (folder / "text.txt").write_bytes(text)
    cfg = DataConfig(
        source=str(folder / "text.txt"),
        sequence_len=length,
        update_len=length,
        batch_size=3,
        validation_fraction=0.0,
        test_fraction=0.0,
    )
    return load_dataset(cfg, 0).with_bos(begin)


@pytest.mark.parametrize("n", [2, 4, 5, 8, 9, 10])
def test_without_a_begin_id_a_window_begins_with_the_token_before(tmp_path: Path, n: int) -> None:
    text = bytes(range(65, 65 + n))
    data, stream = data_of(text, tmp_path, 4, None), [byte + 3 for byte in text]
    pairs = []
    for batch in data.evaluation("train", 3):
        for inputs, targets, mask in zip(batch.inputs, batch.targets, batch.loss_mask, strict=True):
            pairs += [(int(a), int(b)) for a, b, m in zip(inputs, targets, mask, strict=True) if m]
    assert pairs == list(itertools.pairwise(stream)), "each token but the first is predicted once"
    assert (data.train.n_tokens, data.train.n_bytes) == (n - 1, n)
    assert data.unpredicted_bytes("train") == 1
    assert data.raw("train") == text


@pytest.mark.parametrize("begin", [1, 9])
def test_with_one_every_window_begins_with_it(tmp_path: Path, begin: int) -> None:
    data = data_of(b"abcdefgh", tmp_path, 4, begin)
    (batch,) = data.evaluation("train", 4)
    assert batch.inputs[:, 0].tolist() == [begin] * 4
    assert data.train.n_tokens == 8
    assert data.fingerprint == data_of(b"abcdefgh", tmp_path, 4, None).fingerprint, "the content is the same"


def test_evaluation_scores_bare_tokens(tmp_path: Path) -> None:
    """The loss of a text is that of its bare ids, each predicted from those before it, as the forward pass gives it."""
    cfg = tiny.config(tiny.corpus(tmp_path), "moe", **{"model.begin_id": None})
    family = registry.tokens("moe")
    params = weights.init(family.param_specs(cfg.model), jax.random.key(0))
    data = load_dataset(cfg.tokens, cfg.seed)
    found = evaluate(family, cfg, params, None, data, "validation", limit=1)
    length = cfg.tokens.sequence_len
    ids = data.with_bos(None).validation
    tokens = [ids.first_input(0), *ids.window(0).targets.tolist()]
    model = cfg.model_as(MoEConfig)
    x, _ = moe.forward(params, jnp.asarray([tokens[:-1]]), model)
    logprobs = jax.nn.log_softmax(moe.logits(params, x, model))[0]
    nats = -np.asarray(logprobs)[np.arange(length), tokens[1:]].sum()
    assert found.tokens == length
    assert found.nats == pytest.approx(nats, rel=1e-4)


def test_sample_in_training_needs_no_prompt(tmp_path: Path) -> None:
    cfg = tiny.config(tiny.corpus(tmp_path), "moe", **{"model.begin_id": None})
    family = registry.tokens("moe")
    params = weights.init(family.param_specs(cfg.model), jax.random.key(0))
    vocabulary = Vocabulary(tokenizer=open_tokenizer("bytes"), shape=None)
    assert isinstance(sample_text(family, cfg, params, None, vocabulary, prompt="", n_tokens=4, seed=0), str)


def test_begin_id_may_be_left_out_of_one_request(tmp_path: Path) -> None:
    cfg = tiny.config(tiny.corpus(tmp_path), "moe")
    family = registry.tokens("moe")
    params = weights.init(family.param_specs(cfg.model), jax.random.key(0))

    def written(prompt: list[int], add_special_tokens: bool | None) -> list[int]:
        stream = generate(
            family.decoder,
            params,
            None,
            cfg.model,
            [prompt],
            max_tokens=6,
            settings=sampling_settings(1, temperature=0.0, repetition_penalty=1.0),
            seeds=[0],
            ignore_end=True,
            add_special_tokens=add_special_tokens,
        )
        return [token for (piece,) in stream if piece is not None for token in piece.tokens]

    with_begin = written([70, 71, 72], None)
    assert written([70, 71, 72], True) == with_begin == written([1, 70, 71, 72], False)
    assert written([70, 71, 72], False) != with_begin
    with pytest.raises(UserError, match="add_special_tokens"):
        written([], False)


def test_document_in_parts_gets_one_dummy_prefix() -> None:
    encoder = TextEncoder(open_tokenizer(str(TOKENIZER), rules="released"))
    parts = [ChunkItem("a", b"the class o", True, False, False), ChunkItem("a", b"f answers", False, True, True)]
    ids = [encoder.encode(part).tolist() for part in parts]
    assert encoder.tokenizer.decode(ids[0] + ids[1]) == b"the class of answers"
    assert not any(encoder.is_lossy(part, np.asarray(one)) for part, one in zip(parts, ids, strict=True))
