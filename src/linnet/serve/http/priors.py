"""/v1/priors/sample: image embeddings from texts or text embeddings, the best of several candidates, and their nearest images."""

from __future__ import annotations

import dataclasses
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
from linnet.serve.http.build_requests import check_call, choose_seed, given_fields
from linnet.serve.http.errors import ApiError, check_finished
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
SOLVER_FIELDS = ("steps", "solver", "eta", "guidance")


@dataclasses.dataclass(frozen=True, eq=False)
class TextCondition:
    """The conditioning text of a sample."""

    embedding: Float32[np.ndarray, " X"]
    encodings: Float32[np.ndarray, "L X"] | None = None


async def sample(service: Service, http: HttpRequest) -> Response:
    body = await read_json(http, PriorRequest, service.limits)
    model = service.prior(body.model)
    if body.nearest and not model.gallery_rows:
        raise invalid("nearest", body.nearest, "0, because this model has no gallery", "omit it")
    if body.progress is not None and not body.stream:
        raise invalid("progress", body.progress, "omitted unless stream is true", "set stream to true")
    if body.eta is not None and body.solver != "ddim":
        raise invalid("eta", body.eta, "omitted unless solver is ddim", "set solver to ddim")
    id = f"prior-{uuid.uuid4().hex}"
    # Checked before any work is done: the number of texts is known without encoding them.
    n_texts = max(len(_as_list(body.input)), len(_vectors(body.embeddings)))
    check_call(service.limits, n_texts, body.n or 1, body.deadline_seconds, "texts")
    texts = await _texts(body, model)
    requests = _requests(service, body, id, texts)
    call = _PriorCall(body, model, texts, requests, id, http.scope["state"]["request_id"])
    results = await service.submit_samples(model, requests)
    if body.stream:
        return EventStream(with_error_event(call.stream(results), call.request_id), results.close)
    try:
        return JSONResponse(await cancel_on_disconnect(http.receive, call.full(results)))
    finally:
        results.close()


async def _texts(body: PriorRequest, model: PriorModel) -> list[TextCondition]:
    """Encode the input texts, or validate the given embeddings."""
    if (body.input is None) == (body.embeddings is None):
        raise invalid("input and embeddings", "none or both", "one of the two", "give input or embeddings")
    if body.text_encodings is not None and body.embeddings is None:
        needs = "omitted with input, whose encodings the server computes"
        raise invalid("text_encodings", "given without embeddings", needs, "omit it, or give embeddings as well")
    if body.input is not None:
        if not model.takes_text:
            needs = "omitted: the server does not have the text encoder of this model (with token encodings, if it needs them)"
            raise invalid("input", "given", needs, "give embeddings (and text_encodings if max_encodings is above 0)")
        return [TextCondition(*await to_thread.run_sync(model.encode, one)) for one in _as_list(body.input)]
    vectors = [_array("embeddings", one, model.text_width) for one in _vectors(body.embeddings)]
    encodings = _encodings(body, len(vectors))
    if encodings is None:
        return [TextCondition(one) for one in vectors]
    rows = [np.stack([_array("text_encodings", row, model.text_width) for row in one]) for one in encodings]
    return [TextCondition(one, row) for one, row in zip(vectors, rows, strict=True)]


def _as_list(given: str | list[str] | None) -> list[str]:
    return [] if given is None else [given] if isinstance(given, str) else given


def _vectors(given: list[float] | list[list[float]] | None) -> list[list[float]]:
    """Return the vectors of a field. A list of numbers is one vector."""
    vectors = [one for one in given or [] if isinstance(one, list)]
    return vectors or [[one for one in given if not isinstance(one, list)]] if given else []


def _encodings(body: PriorRequest, n: int) -> list[list[list[float]]] | None:
    """Return the token encodings of each text. For a single text the outer list may be omitted."""
    if body.text_encodings is None:
        return None
    encodings: list[Any] = list(body.text_encodings)
    if isinstance(encodings[0][0], float | int):
        encodings = [encodings]
    if len(encodings) != n:
        needs = f"for {n}, as many as embeddings"
        raise invalid("text_encodings", f"for {len(encodings)} texts", needs, "give one list per text")
    return encodings


def _array(field: str, values: Sequence[float], width: int) -> Float32[np.ndarray, " X"]:
    if len(values) != width:
        raise invalid(f"the width of {field}", len(values), f"{width}, the model's", "see text_width in /v1/models")
    with np.errstate(over="ignore"):  # SampleRequest rejects values that are too large
        return np.asarray(values, np.float64).astype(np.float32)


def _requests(service: Service, body: PriorRequest, id: str, texts: Sequence[TextCondition]) -> list[SampleRequest]:
    """Build the engine requests. A text's i-th candidate does not depend on the other texts of the call."""
    n, deadline = body.n or 1, body.deadline_seconds
    seed = choose_seed(body.seed)
    return [
        SampleRequest(
            id=f"{id}-{t * n + i}",
            text=text.embedding,
            encodings=text.encodings,
            seed=(seed + i) % (MAX_SEED + 1),
            n_progress=(DEFAULT_PROGRESS if body.progress is None else body.progress) if body.stream else 0,
            priority=body.priority or 0,
            deadline=None if deadline is None else service.clock() + deadline,
            **given_fields(body, SOLVER_FIELDS),
        )
        for t, text in enumerate(texts)
        for i in range(n)
    ]


class _PriorCall:
    """One running call."""

    def __init__(
        self,
        body: PriorRequest,
        model: PriorModel,
        texts: Sequence[TextCondition],
        requests: Sequence[SampleRequest],
        id: str,
        request_id: str,
    ) -> None:
        self._model, self._texts, self._requests, self.request_id = model, texts, requests, request_id
        self._n, self._k, self._id = body.n or 1, body.nearest or 0, id
        self._created = int(time.time())

    async def full(self, results: ResultStream[SampleRequest, SampleEvent]) -> PriorAnswer:
        samples: dict[int, Sampled] = {}
        async for i, one in results.events():
            if isinstance(one, Sampled):
                samples[i] = self._check_sample(one)
        return await self._answer(samples)

    async def stream(self, results: ResultStream[SampleRequest, SampleEvent]) -> AsyncGenerator[bytes, None]:
        samples: dict[int, Sampled] = {}
        async for i, one in results.events():
            if isinstance(one, Sampled):
                samples[i] = self._check_sample(one)
            else:
                yield event(await self._progress(i, one), "prior.progress")
        yield event({"type": "prior.completed", **await self._answer(samples)}, "prior.completed")

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

    def _check_sample(self, one: Sampled) -> Sampled:
        check_finished(one, self.request_id)
        if one.embedding is None or not np.isfinite(one.embedding).all():
            message = "the embedding is not finite. Fix: use less guidance, or more steps."
            raise ApiError(422, message, code="not_finite")
        return one

    async def _answer(self, samples: dict[int, Sampled]) -> PriorAnswer:
        return {
            "id": self._id,
            "object": "prior.sample",
            "created": self._created,
            "model": self._model.name,
            "system_fingerprint": self._model.fingerprint,
            "steps": samples[0].n_steps,
            "guidance": samples[0].guidance,
            "data": [await self._result(t, samples) for t in range(len(self._texts))],
        }

    async def _result(self, t: int, samples: dict[int, Sampled]) -> PriorResult:
        indices = range(t * self._n, (t + 1) * self._n)
        embeddings = [one for i in indices if (one := samples[i].embedding) is not None]
        candidates: list[Candidate] = [
            {"embedding": one.tolist(), "seed": self._requests[i].seed, "cosine": self._cosine(one, t)}
            for i, one in zip(indices, embeddings, strict=True)
        ]
        best = best_candidate(embeddings, self._texts[t].embedding)
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
        similarity = cosine(embedding, self._texts[text].embedding)
        return None if similarity is None or not np.isfinite(similarity) else similarity

    async def _nearest(self, embedding: np.ndarray) -> list[NearPicture] | None:
        if not self._k or not np.isfinite(embedding).all():
            return None
        near = await to_thread.run_sync(self._model.nearest, embedding, self._k)
        return [{"row": one.row, "cosine": one.cosine, "caption": one.caption, "b64_json": one.image} for one in near]


def cosine(embedding: np.ndarray, text: np.ndarray) -> float | None:
    if embedding.shape != text.shape:
        return None
    return float(l2_normalize(embedding) @ l2_normalize(text))


def best_candidate(candidates: Sequence[np.ndarray], text: np.ndarray) -> int:
    """Return the index of the candidate with the highest cosine similarity to the text; the first if widths differ or values tie."""
    similarity = [cosine(one, text) for one in candidates]
    return int(np.argmax([-2.0 if one is None else one for one in similarity]))
