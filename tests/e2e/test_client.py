"""`linnet.Client` and `linnet.AsyncClient` on a real server: the same results as those of `Run`, sessions, states and errors."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_process import free_port, serving

import linnet

MADE = Path(__file__).parents[1] / "goldens" / "runs_0_1"
KEY = "a-key-of-the-tests-0123456789"
PROMPT = "The finch follows"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    beside = [MADE / name for name in ("moe", "pixels", "prior")]
    with serving(MADE / "vq", beside=beside, keys=KEY) as (address, _):
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[linnet.Client]:
    with linnet.Client(address, api_key=KEY) as client:
        yield client


@pytest.fixture(scope="module")
def runs() -> dict[str, linnet.Run]:
    return {name: linnet.load(MADE / name) for name in ("vq", "moe", "pixels", "prior")}


def details(text: linnet.GeneratedText) -> tuple[Any, ...]:
    return str(text), text.token_ids, text.finish_reason, text.seed


@pytest.mark.parametrize("model", ["vq", "moe"])
def test_generate_equals_the_run(client: linnet.Client, runs: dict[str, linnet.Run], model: str) -> None:
    run, prompts = runs[model], [PROMPT, "The owl", "A"]
    alone = run.generate(PROMPT, max_tokens=24, seed=3)
    text = client.generate(PROMPT, max_tokens=24, seed=3, model=model)
    assert details(text) == details(alone)
    np.testing.assert_allclose(text.logprobs, alone.logprobs, atol=1e-4)
    expected = run.generate(prompts, max_tokens=16, temperature=0.8, seed=[1, 2, 1], stop="e")
    texts = client.generate(prompts, max_tokens=16, temperature=0.8, seed=[1, 2, 1], stop="e", model=model)
    assert [details(one) for one in texts] == [details(one) for one in expected]
    ids = run.encode(PROMPT)
    assert details(client.generate(ids, max_tokens=24, seed=3, model=model)) == details(alone)


def test_eos_is_reported_as_by_the_run(client: linnet.Client, runs: dict[str, linnet.Run]) -> None:
    """The server's `stop` is EOS here. A bias makes EOS certain."""
    end = runs["vq"].loaded.vocabulary.tokenizer.eos_id
    text = client.generate(PROMPT, max_tokens=8, seed=1, logit_bias={end: 100.0})
    assert (text, text.token_ids, text.finish_reason) == ("", (end,), "end")


def test_more_prompts_than_one_call_takes(client: linnet.Client) -> None:
    prompts = [f"The owl {i}" for i in range(40)]
    texts = client.generate(prompts, max_tokens=2, seed=5)
    assert texts == [client.generate([one], max_tokens=2, seed=5)[0] for one in prompts]


def test_streams_equal_the_whole(client: linnet.Client) -> None:
    full = client.generate(PROMPT, max_tokens=40, seed=1)
    pieces = list(client.generate(PROMPT, max_tokens=40, seed=1, stream=True))
    assert len(pieces) > 2
    assert details(linnet.GeneratedText.from_pieces(pieces)) == details(full)
    assert linnet.GeneratedText.from_pieces(pieces).logprobs == full.logprobs
    rows = list(client.generate([PROMPT, "The owl"], max_tokens=40, seed=1, stream=True))
    first = [row[0] for row in rows if row[0] is not None]
    assert details(linnet.GeneratedText.from_pieces(first)) == details(full)


@pytest.mark.parametrize("model", ["vq", "moe"])
def test_scores_equal_the_runs(client: linnet.Client, runs: dict[str, linnet.Run], model: str) -> None:
    texts = ["The finch follows the wren.", "für"]
    for ours, theirs in zip(client.score(texts, model=model), runs[model].score(texts), strict=True):
        assert (ours.text, ours.tokens, ours.n_bytes) == (theirs.text, theirs.tokens, theirs.n_bytes)
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
    assert client.score(texts[0], model=model).bits_per_byte == pytest.approx(
        runs[model].score(texts[0]).bits_per_byte, abs=1e-4
    )


def test_tokens_and_models(client: linnet.Client, runs: dict[str, linnet.Run]) -> None:
    ids = client.encode(PROMPT, model="moe")
    assert ids.tolist() == runs["moe"].encode(PROMPT).tolist()
    assert client.decode(ids, model="moe") == PROMPT
    assert [card["id"] for card in client.models()] == ["vq", "moe", "pixels", "prior"]
    assert client.health() == "ready"
    assert repr(client) == f"Client({client.url!r})"


def test_chat(client: linnet.Client) -> None:
    answer = client.chat("Who sings?", max_tokens=12, seed=1)
    messages = [{"role": "user", "content": "Who sings?"}]
    pieces = list(client.chat(messages, max_tokens=12, seed=1, stream=True))
    assert len(answer.token_ids) == len(answer.logprobs) > 0
    assert details(linnet.GeneratedText.from_pieces(pieces)) == details(answer)
    with client.session() as session:
        assert details(session.chat("Who sings?", max_tokens=12, seed=1)) == details(answer)
        again = session.fork()
        answer = session.chat("And who else?", max_tokens=12, seed=1)
        pieces = list(again.chat("And who else?", max_tokens=12, seed=1, stream=True))
        assert details(linnet.GeneratedText.from_pieces(pieces)) == details(answer)
        again.close()


def test_sessions_equal_those_of_the_run(client: linnet.Client, runs: dict[str, linnet.Run], tmp_path: Path) -> None:
    local = runs["vq"].session()
    with client.session() as session:
        assert session.n_tokens == 0
        for prompt in ("The owl", " and the wren"):
            assert session.append(prompt).n_tokens == local.n_tokens
            with pytest.raises(linnet.UserError, match="was not read yet"):
                session.to_bytes()
            expected = local.append(prompt).generate(" sees", max_tokens=10, seed=2)
            assert details(session.generate(" sees", max_tokens=10, seed=2)) == details(expected)
            assert session.n_tokens == local.n_tokens
        fork = session.fork()
        state = session.to_bytes()
        assert session.state_bytes == fork.state_bytes
        path = session.save(tmp_path / "new" / "session.safetensors")
        restored, opened = client.session(path, model="vq"), client.session(id=fork.id)
        expected = local.generate(" again", max_tokens=10, seed=4)
        pieces = list(session.generate(" again", max_tokens=10, seed=4, stream=True))
        texts = [linnet.GeneratedText.from_pieces(pieces)]
        texts += [one.generate(" again", max_tokens=10, seed=4) for one in (restored, opened)]
        assert [details(one) for one in texts] == [details(expected)] * 3
        assert session.n_tokens == restored.n_tokens == opened.n_tokens == local.n_tokens
        assert details(runs["vq"].session(state).generate(" again", max_tokens=10, seed=4)) == details(expected)
    for one in (restored, fork):
        one.close()
    opened.close()  # the same session as `fork`
    assert repr(fork) == "RemoteSession(closed)"
    with pytest.raises(linnet.UserError, match="closed"):
        session.generate("x")
    with pytest.raises(linnet.ServerError, match="session") as caught:
        client.session(id=session.id)
    assert (caught.value.status, caught.value.code) == (404, "session_not_found")


def test_stream_that_is_closed_leaves_the_session_as_it_was(client: linnet.Client) -> None:
    with client.session() as session:
        session.generate("The owl", max_tokens=4, seed=1)
        before = session.to_bytes()
        stream = session.generate(" sees", max_tokens=500, seed=1, stream=True, ignore_eos=True)
        next(stream)
        stream.close()  # pyright: ignore[reportAttributeAccessIssue]
        for _ in range(100):  # the server notices the disconnect a moment later
            with contextlib.suppress(linnet.ServerError):
                session.generate(max_tokens=1, seed=9)
                break
            time.sleep(0.05)
        restored = client.session(before, model="vq")
        restored.generate(max_tokens=1, seed=9)
        assert restored.to_bytes() == session.to_bytes()
        restored.close()


def test_states_are_stored_by_the_client(client: linnet.Client, runs: dict[str, linnet.Run]) -> None:
    first = client.generate("The owl", max_tokens=8, seed=1, return_state=True)
    assert first.state is not None
    again = [client.generate(" sees", max_tokens=8, seed=1, state=first.state) for _ in range(2)]
    assert again[0] == again[1] == runs["vq"].session(first.state).generate(" sees", max_tokens=8, seed=1)
    pieces = list(client.generate("The owl", max_tokens=8, seed=1, return_state=True, stream=True))
    assert linnet.GeneratedText.from_pieces(pieces).state == first.state
    assert again[0].state is None


def test_images_and_embeddings(client: linnet.Client, runs: dict[str, linnet.Run]) -> None:
    ours, theirs = client.generate_images(3, seed=2, model="pixels"), runs["pixels"].generate_images(3, seed=2)
    assert ours.seeds == theirs.seeds
    np.testing.assert_array_equal(ours.pixels, theirs.pixels)
    embeddings = np.random.default_rng(0).standard_normal((3, runs["prior"].config.prior.dim)).astype(np.float32)
    text_len = client_card(client, "prior")["max_encodings"]
    encodings = np.ones((3, text_len, embeddings.shape[1]), np.float32) if text_len else None
    given: dict[str, Any] = {"embeddings": embeddings, "text_encodings": encodings, "n": 2, "steps": 4, "seed": 5}
    found, expected = client.sample(**given), runs["prior"].sample(**given)
    np.testing.assert_allclose(found.embeddings, expected.embeddings, atol=1e-4)
    assert (found.texts, found.seeds, found.steps) == (expected.texts, expected.seeds, expected.steps)
    assert found.cosines is not None
    assert expected.cosines is not None
    np.testing.assert_allclose(found.cosines, expected.cosines, atol=1e-4)
    assert [len(row) for row in found.nearest] == [len(row) for row in expected.nearest]
    with pytest.raises(linnet.UserError, match="one of the two"):
        client.sample()


def client_card(client: linnet.Client, name: str) -> Any:
    return next(card for card in client.models() if card["id"] == name)


def test_async_client_equals_the_sync_one(client: linnet.Client, address: str) -> None:
    """Twenty concurrent calls, streams among them, with each result as alone."""
    prompts = [f"The owl {i % 7}" for i in range(20)]
    expected = client.generate(prompts, max_tokens=12, seed=3)

    async def main() -> None:
        async with linnet.AsyncClient(address, api_key=KEY) as remote:

            async def streamed(prompt: str) -> linnet.GeneratedText:
                pieces = [piece async for piece in remote.generate(prompt, max_tokens=12, seed=3, stream=True)]
                return linnet.GeneratedText.from_pieces(pieces)

            calls = [
                streamed(one) if i % 2 else remote.generate(one, max_tokens=12, seed=3) for i, one in enumerate(prompts)
            ]
            texts = await asyncio.gather(*calls)
            assert [details(one) for one in texts] == [details(one) for one in expected]
            assert await remote.generate(prompts, max_tokens=12, seed=3) == expected
            assert (await remote.score(PROMPT)).nats == pytest.approx(client.score(PROMPT).nats, rel=1e-6)
            assert await remote.decode(await remote.encode(PROMPT)) == PROMPT
            assert await remote.health() == "ready"
            assert len(await remote.models()) == 4
            assert await remote.chat("Who?", max_tokens=4, seed=1) == client.chat("Who?", max_tokens=4, seed=1)
            assert (await remote.generate_images(2, seed=1, model="pixels")).seeds == (1, 2)
            async with await remote.session() as session:
                first = await session.append("The").generate(" owl", max_tokens=12, seed=3)
                fork = await session.fork()
                pieces = [one async for one in fork.generate(" sees", max_tokens=6, seed=1, stream=True)]
                assert "".join(pieces) == await session.generate(" sees", max_tokens=6, seed=1)
                assert await fork.to_bytes() == await session.to_bytes()
                await fork.close()
            assert first == client.generate("The owl", max_tokens=12, seed=3)
            with pytest.raises(linnet.UserError, match="closed"):
                await session.generate("x")
            with pytest.raises(linnet.ServerError, match="no-such"):
                await remote.generate("x", model="no-such")

    asyncio.run(main())


def test_errors_name_the_fix(client: linnet.Client, address: str) -> None:
    with pytest.raises(linnet.ServerError, match="top_p.*status 400, request id") as caught:
        client.generate("x", top_p=2.0)
    error = caught.value
    assert isinstance(error, linnet.LinnetError)
    assert (error.status, error.code, error.param) == (400, "invalid_value", "top_p")
    assert error.request_id
    assert error.request_id not in error.message
    with pytest.raises(linnet.ServerError, match="top_p"):
        list(client.generate("x", top_p=2.0, stream=True))
    with pytest.raises(TypeError, match="'temprature'. Did you mean 'temperature'"):
        client.generate("x", temprature=1.0)  # pyright: ignore[reportCallIssue]
    with linnet.Client(address, api_key="wrong-key-0123456789abcdef") as other:
        with pytest.raises(linnet.ServerError, match="key") as rejection:
            other.generate("x")
        assert rejection.value.status == 401
        assert other.health() == "ready"  # needs no key
    nobody = f"http://127.0.0.1:{free_port()}"
    with (
        linnet.Client(nobody) as other,
        pytest.raises(linnet.ServerConnectionError, match=f"no server answers at {nobody}.*Fix: .*linnet serve RUN"),
    ):
        other.health()


def test_client_does_not_import_jax(address: str) -> None:
    program = (
        "import sys, linnet; c = linnet.Client(sys.argv[1], api_key=sys.argv[2]); c.generate('x', max_tokens=2); "
        "c.score('abc'); c.generate_images(model='pixels'); "
        "print([m for m in ('jax', 'optax', 'starlette', 'pydantic') if m in sys.modules])"
    )
    command = [sys.executable, "-c", program, address, KEY]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
