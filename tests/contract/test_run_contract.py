"""What can be done with a trained run, for every family: evaluate, sample, serve, plan, export, adapt, report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import httpx
import numpy as np
import pytest
import subjects
from engine_requests import Model, PendingRequest, plain, request, running_engine
from fake_model import talk
from run_comparison import assert_same_bits

import linnet
from linnet.cli import main
from linnet.cli.convert_flags import ExportFlags
from linnet.config import codec
from linnet.config.tuning import LoraConfig
from linnet.core import params
from linnet.core.errors import UserError
from linnet.evaluate.language_model import make_nats
from linnet.models.base import TokenFamily
from linnet.optim.lora import trainable_specs
from linnet.plan.serving import plan_serving
from linnet.plan.training import plan_training
from linnet.report.build import write_report
from linnet.runs.load import LoadedRun, open_run
from linnet.serve.engine import EngineConfig
from linnet.serve.prior.served import serve_prior
from linnet.serve.served import serve_model

PROMPT = "linear time "
TEXT = np.eye(subjects.WIDTH, dtype=np.float32)[:2]


@pytest.fixture(scope="module")
def run(uninterrupted: Path) -> LoadedRun:
    return open_run(uninterrupted, "latest")


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as exit:
        main(list(words))
    return int(exit.value.code or 0)


# Evaluation


def test_it_is_evaluated(uninterrupted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("eval", str(uninterrupted), "--split", "validation", "--checkpoint", "latest", "--json") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    reported = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    first = next(r for r in reported if r["kind"] == "train")
    assert result["loss"] < first["loss"]


def test_likelihoods_are_those_of_a_distribution(run: LoadedRun) -> None:
    """All that may follow a text has probability 1 together."""
    family, cfg = run.family, run.cfg
    if not isinstance(family, TokenFamily):
        pytest.skip("it has no likelihood of tokens")
    from linnet.data.batch import Batch

    n, length = cfg.lm.n_vocab, cfg.tokens.update_len
    inputs = np.broadcast_to(np.arange(length, dtype=np.int32) + 5, (n, length))
    targets = np.array(inputs)
    targets[:, -1] = np.arange(n)
    zeros = np.zeros_like(inputs)
    batch = Batch(inputs=inputs, targets=targets, doc_ids=zeros, loss_mask=zeros.astype(np.float32))
    values, _ = make_nats(family, cfg)(run.params, run.buffers, family.empty_carry(cfg.model, n), batch)
    assert np.sum(np.exp(-np.asarray(values, np.float64)[:, -1])) == pytest.approx(1.0, abs=1e-4)


# Sampling


def test_it_samples(uninterrupted: Path, run: LoadedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if run.family.decoder is not None:
        requested = ["--prompt", PROMPT, "--max-tokens", "8"]
    else:
        np.save(tmp_path / "text.npy", TEXT)
        requested = ["--embedding", str(tmp_path / "text.npy"), "--steps", "4", "--out", str(tmp_path)]
    reported = []
    for seed in ("1", "1", "2"):
        assert command("sample", str(uninterrupted), *requested, "--seed", seed, "--json") == 0
        reported.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    values = [one.get("texts") or one for one in reported]
    assert _plain(values[0]) == _plain(values[1]), "the same seed gives the same"
    assert _plain(values[0]) != _plain(values[2])


def _plain(values: Any) -> str:
    """As text, without the names of seeds."""
    return json.dumps(values, sort_keys=True).replace('"seed": 2', '"seed": 1')


def test_decoding_predicts_what_evaluation_does(uninterrupted: Path, run: LoadedRun) -> None:
    """Log-probabilities of generated tokens, which are computed one token at a time, against those of a whole text."""
    if run.family.decoder is None:
        pytest.skip("it does not write tokens")
    opened = linnet.load(uninterrupted, checkpoint="latest")
    output = opened.generate(PROMPT, max_tokens=12, seed=3, ignore_eos=True, top_p=1.0)
    ids = [*opened.encode(PROMPT), *output.token_ids]
    score = _nats(run, [int(token) for token in ids])
    np.testing.assert_allclose(output.logprobs, -score[-12:], atol=2e-4)


def _nats(run: LoadedRun, ids: list[int]) -> np.ndarray:
    from linnet.evaluate.score import score_ids

    return -np.asarray(score_ids(run.lm, run.cfg, run.params, run.buffers, ids, make_nats(run.lm, run.cfg)))


# Serving


@contextlib.contextmanager
def served(run: LoadedRun) -> Iterator[Any]:
    if run.family.decoder is None:
        model = serve_prior("it", run.cfg.prior, run.params, encoder=None, gallery=None, n_slots=2, max_waiting=9)
    else:
        vocabulary = run.vocabulary
        config = EngineConfig(n_slots=2)
        given = (run.lm, run.cfg.model, run.params, run.buffers, vocabulary.tokenizer, vocabulary.shape)
        model = serve_model("it", *given, config)
    try:
        yield model
    finally:
        model.engine.stop(within=5)


def test_it_is_served_over_http(uninterrupted: Path, run: LoadedRun) -> None:
    with served(run) as model:
        if run.family.decoder is None:
            _ask_embeddings(model)
        else:
            _ask_text(model, linnet.load(uninterrupted, checkpoint="latest"))


def _post(model: Any, *requests: tuple[str, dict[str, Any]]) -> list[Any]:
    """The answers, asked one after the other."""

    async def all_of_them(client: httpx.AsyncClient) -> list[Any]:
        answers = []
        for path, body in requests:
            body = {name: answers[0]["id"] if value is FIRST else value for name, value in body.items()}
            answer = await client.post(path, json=body)
            assert answer.status_code in (200, 201), answer.text
            answers.append(answer.json())
        return answers

    return talk(all_of_them, model)


FIRST = object()
"""In place of the id in the first answer."""


def _ask_text(model: Any, same: linnet.Run) -> None:
    """The server says what the library says, and a session continues as if it had not been interrupted."""
    path, settings = "/v1/completions", {"max_tokens": 8, "seed": 3, "top_p": 1.0, "ignore_eos": True}
    several, _, first, more = _post(
        model,
        (path, {"prompt": [PROMPT, "exact"], **settings}),
        ("/v1/sessions", {}),
        (path, {"prompt": PROMPT, **settings}),
        ("/v1/tokenize", {"text": PROMPT}),
    )
    texts = [choice["text"] for choice in several["choices"]]
    assert (
        texts[0]
        == first["choices"][0]["text"]
        == same.generate(PROMPT, max_tokens=8, seed=3, top_p=1.0, ignore_eos=True)
    )
    assert more["tokens"] == same.encode(PROMPT).tolist()
    greedy = {"temperature": 0, "ignore_eos": True, "logprobs": 1}
    _, start, end = _post(
        model,
        ("/v1/sessions", {}),
        (path, {"session": FIRST, "prompt": PROMPT, "max_tokens": 3, **greedy}),
        (path, {"session": FIRST, "prompt": "", "max_tokens": 5, **greedy}),
    )
    output = [value for one in (start, end) for value in one["choices"][0]["logprobs"]["token_logprobs"]]
    alone = same.generate(PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True)
    np.testing.assert_allclose(output, alone.logprobs, rtol=1e-5)  # bits: the next test, with full optimisations


@pytest.mark.slow
@pytest.mark.optimized
def test_batched_equals_alone_bit_by_bit(uninterrupted: Path, run: LoadedRun) -> None:
    """Several requests at once, in fewer slots than there are requests."""
    if run.family.decoder is None:
        pytest.skip("it does not write tokens")
    model = Model(run.lm, run.cfg.model, run.params, run.buffers)
    with running_engine(model, n_slots=2) as engine:
        requested = [PendingRequest(engine, request(PROMPT[: 4 * n], seed=n, max_tokens=16)) for n in (1, 2, 3)]
        for one in requested:
            answer = one.answer()
            assert (answer.tokens, answer.logprobs) == plain(one.request, model)


def _ask_embeddings(model: Any) -> None:
    path, settings = "/v1/priors/sample", {"steps": 4, "seed": 3}
    both, first = _post(
        model,
        (path, {"embeddings": TEXT.tolist(), **settings}),
        (path, {"embeddings": TEXT[0].tolist(), **settings}),
    )
    assert both["data"][0]["embedding"] == first["data"][0]["embedding"]
    assert both["data"][0]["embedding"] != both["data"][1]["embedding"]


# Planning


def test_training_is_planned(run: LoadedRun) -> None:
    plan = plan_training(run.cfg)
    count = params.count(run.family.param_specs(run.cfg.model))
    assert plan.memory.parameters == plan.memory.average == 4 * count
    assert plan.memory.optimizer >= 8 * count
    assert plan.memory.carry > 0 or run.cfg.data.updates_per_sequence == 1
    assert plan.program.flops > 0.5 * plan.useful_flops > 0


def test_serving_is_planned(run: LoadedRun) -> None:
    if run.family.decoder is None:
        with pytest.raises(UserError, match="family"):
            plan_serving(run.cfg, "float32")
        return
    plan = plan_serving(run.cfg, "float32")
    assert plan.weight_bytes >= 4 * params.count(run.family.param_specs(run.cfg.model))
    assert plan.slot_bytes > 0
    with served(run) as model:
        assert plan.slot_bytes == model.state_bytes


# Exporting


def test_it_is_exported_and_read_back_bit_by_bit(uninterrupted: Path, run: LoadedRun, tmp_path: Path) -> None:
    file = tmp_path / "it.safetensors"
    assert command("export", str(uninterrupted), "--checkpoint", "latest", "--out", str(file)) == 0
    again = open_run(file)
    assert_same_bits((again.params, again.buffers), (run.params, run.buffers))
    assert again.cfg.model == run.cfg.model
    assert command("import", "safetensors", str(file), "--out", str(tmp_path / "run")) == 0
    assert_same_bits(open_run(tmp_path / "run").params, run.params)


def test_it_is_exported_in_the_formats_of_its_family(
    uninterrupted: Path, run: LoadedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in get_args(get_type_hints(ExportFlags)["format"]):
        out = tmp_path / f"{name}.out"
        code = command("export", str(uninterrupted), "--checkpoint", "latest", "--format", name, "--out", str(out))
        output = capsys.readouterr().err
        assert (code == 0) == out.exists(), output
        if name != "safetensors" and name not in run.cfg.model.EXPORT_FORMATS:
            assert f"it must be one for {run.cfg.family} models" in output
        elif code:  # a format of the family, but not for all of its models
            assert "model.n_expert is 4, but it must be 0: the reference has no place" in output
            assert run.cfg.model.routing is not None


# Adapters


def test_adapters_are_trained_where_the_family_says_which(run: LoadedRun, uninterrupted: Path, tmp_path: Path) -> None:
    cfg = dataclasses.replace(run.cfg, lora=LoraConfig(rank=2))
    if not run.family.lora_targets:
        with pytest.raises(UserError, match=r"lora.rank is 2.*adapters are for"):
            trainable_specs(run.family, cfg)
        return
    assert 0 < params.count(trainable_specs(run.family, cfg)) < params.count(run.family.param_specs(cfg.model))
    requested = ["--lora.rank", "2", "--optim.steps", "4", "--train.eval-every", "0", "--optim.warmup-steps", "0"]
    assert command("train", "--from", str(uninterrupted), *requested, "--out", str(tmp_path / "tuned"), "--quiet") == 0
    tuned = open_run(tmp_path / "tuned")
    assert params.count(tuned.family.param_specs(tuned.cfg.model)) == sum(map(np.size, _leaves(tuned.params)))


def _leaves(tree: Any) -> list[Any]:
    import jax

    return jax.tree.leaves(tree)


# The report


def test_report_has_the_sections_of_the_family(uninterrupted: Path, run: LoadedRun) -> None:
    page = write_report(uninterrupted).read_text().lower()
    assert "loss" in page
    for name in ("codebooks", "experts"):
        expected = name in run.cfg.model.REPORT_SECTIONS or (name == "experts" and run.cfg.model.routing is not None)
        assert (f">{name}" in page) == expected, name


# Commands


def test_train_is_the_same_command_for_every_family(subject: str, folder: Path, tmp_path: Path) -> None:
    cfg = subjects.config(subject, folder, **{"optim.steps": 5, "optim.warmup_steps": 1})
    codec.save(cfg, tmp_path / "config.json")
    assert command("train", str(tmp_path / "config.json"), "--out", str(tmp_path / "run"), "--quiet") == 0
    assert open_run(tmp_path / "run", "latest").step == 5
