"""/v1/priors/sample: image embeddings from texts or text embeddings, the best of several candidates, and their nearest images."""

from __future__ import annotations

import dataclasses
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
from anyio import to_thread
from jaxtyping import Float32
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from linnet.core.errors import invalid
from linnet.data.embeddings.neighbors import l2_normalize
from linnet.serve.http.errors import ApiError, of_ending
from linnet.serve.http.limits import read_json
from linnet.serve.http.model import PriorModel
from linnet.serve.http.responses import Candidate, NearPicture, PriorAnswer, PriorResult
from linnet.serve.http.results import ResultStream
from linnet.serve.http.schemas import PriorRequest
from linnet.serve.http.service import Service
from linnet.serve.http.sse import EventStream, cancel_on_disconnect, event, with_error_event
from linnet.serve.prior.request import Denoised, Sampled, SampleEvent, SampleRequest
from linnet.serve.request import MAX_SEED

DEFAULT_PROGRESS = 16
PASSED_ON = ("steps", "solver", "eta", "guidance")


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """The conditioning text of a sample."""

    embedding: Float32[np.ndarray, " X"]
    encodings: Float32[np.ndarray, "L X"] | None = None


async def sample(service: Service, http: HttpRequest) -> Response:
    ask = await read_json(http, PriorRequest, service.limits)
    model = service.prior(ask.model)
    if ask.nearest and not model.gallery_rows:
        raise invalid("nearest", ask.nearest, "0, because this model has no gallery", "omit it")
    if ask.progress is not None and not ask.stream:
        raise invalid("progress", ask.progress, "omitted unless stream is true", "set stream to true")
    if ask.eta is not None and ask.solver != "ddim":
        raise invalid("eta", ask.eta, "omitted unless solver is ddim", "set solver to ddim")
    id = f"prior-{uuid.uuid4().hex}"
    # Checked before any work is done: the number of texts is known without encoding them.
    n_texts = max(len(_several(ask.input)), len(_vectors(ask.embeddings)))
    _check_bounds(service, ask, n_texts)
    texts = await _texts(ask, model)
    requests = _requests(service, ask, id, texts)
    sampling = _Sampling(ask, model, texts, requests, id, http.scope["state"]["request_id"])
    answers = await service.submit_samples(model, requests)
    if ask.stream:
        return EventStream(with_error_event(sampling.stream(answers), sampling.request_id), answers.close)
    try:
        return JSONResponse(await cancel_on_disconnect(http.receive, sampling.whole(answers)))
    finally:
        answers.close()


def _check_bounds(service: Service, ask: PriorRequest, n_texts: int) -> None:
    limits, n = service.limits, ask.n or 1
    if n_texts * n > limits.answers:
        got = f"{n_texts} texts x {n}"
        raise invalid("the number of answers", got, f"at most {limits.answers}", "send several calls")
    if ask.deadline_seconds is not None and ask.deadline_seconds > limits.deadline_seconds:
        raise invalid(
            "deadline_seconds", ask.deadline_seconds, f"at most {limits.deadline_seconds:g}", "use a smaller value"
        )


async def _texts(ask: PriorRequest, model: PriorModel) -> list[Text]:
    """Encode the input texts, or validate the given embeddings."""
    if (ask.input is None) == (ask.embeddings is None):
        raise invalid("input and embeddings", "none or both", "one of the two", "give input or embeddings")
    if ask.text_encodings is not None and ask.embeddings is None:
        needs = "omitted with input, whose encodings the server computes"
        raise invalid("text_encodings", "given without embeddings", needs, "omit it, or give embeddings as well")
    if ask.input is not None:
        if not model.takes_text:
            needs = "omitted: the server does not have the text encoder of this model (with token encodings, if it needs them)"
            raise invalid("input", "given", needs, "give embeddings (and text_encodings if max_encodings is above 0)")
        return [Text(*await to_thread.run_sync(model.encode, one)) for one in _several(ask.input)]
    vectors = [_array("embeddings", one, model.text_width) for one in _vectors(ask.embeddings)]
    encodings = _encodings(ask, len(vectors))
    if encodings is None:
        return [Text(one) for one in vectors]
    rows = [np.stack([_array("text_encodings", row, model.text_width) for row in one]) for one in encodings]
    return [Text(one, several) for one, several in zip(vectors, rows, strict=True)]


def _several(given: str | list[str] | None) -> list[str]:
    return [] if given is None else [given] if isinstance(given, str) else given


def _vectors(given: list[float] | list[list[float]] | None) -> list[list[float]]:
    """Return the vectors of a field. A list of numbers is one vector."""
    several = [one for one in given or [] if isinstance(one, list)]
    return several or [[one for one in given if not isinstance(one, list)]] if given else []


def _encodings(ask: PriorRequest, n: int) -> list[list[list[float]]] | None:
    """Return the token encodings of each text. For a single text the outer list may be omitted."""
    if ask.text_encodings is None:
        return None
    found: list[Any] = list(ask.text_encodings)
    if isinstance(found[0][0], float | int):
        found = [found]
    if len(found) != n:
        needs = f"for {n}, as many as embeddings"
        raise invalid("text_encodings", f"for {len(found)} texts", needs, "give one list per text")
    return found


def _array(field: str, values: Sequence[float], width: int) -> Float32[np.ndarray, " X"]:
    if len(values) != width:
        raise invalid(f"the width of {field}", len(values), f"{width}, the model's", "see text_width in /v1/models")
    with np.errstate(over="ignore"):  # SampleRequest rejects values that are too large
        return np.asarray(values, np.float64).astype(np.float32)


def _requests(service: Service, ask: PriorRequest, id: str, texts: Sequence[Text]) -> list[SampleRequest]:
    """Build the engine requests. A text's i-th candidate does not depend on the other texts of the call."""
    n, deadline = ask.n or 1, ask.deadline_seconds
    seed = secrets.randbelow(MAX_SEED + 1) if ask.seed is None else ask.seed
    given = {name: getattr(ask, name) for name in PASSED_ON if getattr(ask, name) is not None}
    return [
        SampleRequest(
            id=f"{id}-{t * n + i}",
            text=text.embedding,
            encodings=text.encodings,
            seed=(seed + i) % (MAX_SEED + 1),
            n_progress=(DEFAULT_PROGRESS if ask.progress is None else ask.progress) if ask.stream else 0,
            priority=ask.priority or 0,
            deadline=None if deadline is None else service.clock() + deadline,
            **given,
        )
        for t, text in enumerate(texts)
        for i in range(n)
    ]


class _Sampling:
    """One running call."""

    def __init__(
        self,
        ask: PriorRequest,
        model: PriorModel,
        texts: Sequence[Text],
        requests: Sequence[SampleRequest],
        id: str,
        request_id: str,
    ) -> None:
        self._model, self._texts, self._requests, self.request_id = model, texts, requests, request_id
        self._n, self._k, self._id = ask.n or 1, ask.nearest or 0, id
        self._created = int(time.time())

    async def whole(self, answers: ResultStream[SampleRequest, SampleEvent]) -> PriorAnswer:
        found: dict[int, Sampled] = {}
        async for i, one in answers.events():
            if isinstance(one, Sampled):
                found[i] = self._checked(one)
        return await self._answer(found)

    async def stream(self, answers: ResultStream[SampleRequest, SampleEvent]) -> AsyncGenerator[bytes, None]:
        found: dict[int, Sampled] = {}
        async for i, one in answers.events():
            if isinstance(one, Sampled):
                found[i] = self._checked(one)
            else:
                yield event(await self._progress(i, one), "prior.progress")
        yield event({"type": "prior.completed", **await self._answer(found)}, "prior.completed")

    async def _progress(self, i: int, one: Denoised) -> dict[str, Any]:
        text, candidate = divmod(i, self._n)
        return {
            "type": "prior.progress",
            "index": text,
            "candidate": candidate,
            "step": one.step,
            "steps": one.n_steps,
            "cosine": self._cosine(one.start, text),
            "nearest": await self._nearest(one.start),
        }

    def _checked(self, one: Sampled) -> Sampled:
        problem = of_ending(one, self.request_id)
        if problem is not None:
            raise problem
        if one.embedding is None or not np.isfinite(one.embedding).all():
            message = "the embedding is not finite. Fix: use less guidance, or more steps."
            raise ApiError(422, message, code="not_finite")
        return one

    async def _answer(self, found: dict[int, Sampled]) -> PriorAnswer:
        return {
            "id": self._id,
            "object": "prior.sample",
            "created": self._created,
            "model": self._model.name,
            "system_fingerprint": self._model.fingerprint,
            "steps": found[0].n_steps,
            "guidance": found[0].guidance,
            "data": [await self._result(t, found) for t in range(len(self._texts))],
        }

    async def _result(self, t: int, found: dict[int, Sampled]) -> PriorResult:
        places = range(t * self._n, (t + 1) * self._n)
        embeddings = [one for i in places if (one := found[i].embedding) is not None]
        candidates: list[Candidate] = [
            {"embedding": one.tolist(), "seed": self._requests[i].seed, "cosine": self._cosine(one, t)}
            for i, one in zip(places, embeddings, strict=True)
        ]
        best = most_like(embeddings, self._texts[t].embedding)
        return {
            "index": t,
            "object": "prior.embedding",
            "best": best,
            **candidates[best],
            "candidates": candidates,
            "nearest": await self._nearest(embeddings[best]),
        }

    def _cosine(self, embedding: np.ndarray, text: int) -> float | None:
        """Cosine similarity to the text; None if the widths differ or the embedding is not finite."""
        likeness = cosine(embedding, self._texts[text].embedding)
        return None if likeness is None or not np.isfinite(likeness) else likeness

    async def _nearest(self, embedding: np.ndarray) -> list[NearPicture] | None:
        if not self._k or not np.isfinite(embedding).all():
            return None
        near = await to_thread.run_sync(self._model.nearest, embedding, self._k)
        return [{"row": one.row, "cosine": one.cosine, "caption": one.caption, "b64_json": one.picture} for one in near]


def cosine(embedding: np.ndarray, text: np.ndarray) -> float | None:
    if embedding.shape != text.shape:
        return None
    return float(l2_normalize(embedding) @ l2_normalize(text))


def most_like(candidates: Sequence[np.ndarray], text: np.ndarray) -> int:
    """Return the index of the candidate with the highest cosine similarity to the text; the first if widths differ or values tie."""
    likeness = [cosine(one, text) for one in candidates]
    return int(np.argmax([-2.0 if one is None else one for one in likeness]))
