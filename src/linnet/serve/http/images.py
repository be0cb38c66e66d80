"""/v1/images/generations: an image is an answer of fixed length whose ids are bytes. Streams also send partial images."""

from __future__ import annotations

import base64
import math
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import numpy as np
from anyio import to_thread
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from linnet.core.errors import invalid
from linnet.core.special_tokens import FIRST_BYTE, N_BYTE_IDS
from linnet.data.images import SHEET_GREY, ids_to_pixels, to_png
from linnet.serve.http.build_requests import base_sampling, build_requests
from linnet.serve.http.errors import check_finished
from linnet.serve.http.limits import read_json
from linnet.serve.http.model import TokenModel
from linnet.serve.http.responses import ImagesAnswer, ImageUsage
from linnet.serve.http.results import ResultStream
from linnet.serve.http.schemas import ImageRequest
from linnet.serve.http.service import Service
from linnet.serve.http.sse import EventStream, cancel_on_disconnect, event, with_error_event
from linnet.serve.request import Event, Finished, TokensEvent

DEFAULT_PARTIAL_IMAGES = 8
PIXEL_IDS = frozenset(range(FIRST_BYTE, N_BYTE_IDS))


async def images(service: Service, http: HttpRequest) -> Response:
    body = await read_json(http, ImageRequest, service.limits)
    model = service.model(body.model)
    shape = _shape(body, model)
    n = body.n or 1
    if body.stream and n > 1:
        raise invalid("n", n, "1 in a stream", "send several calls")
    # Only byte ids, and exactly as many as the image has values, so that it is always complete.
    sampling = base_sampling(body, max_tokens=math.prod(shape), allowed=PIXEL_IDS, ignore_eos=True)
    results = await service.submit(model, build_requests(service, body, f"img-{uuid.uuid4().hex}", [()], sampling, n))
    call = _ImageCall(shape, results, http.scope["state"]["request_id"])
    if body.stream:
        n_partial = DEFAULT_PARTIAL_IMAGES if body.partial_images is None else body.partial_images
        return EventStream(with_error_event(call.stream(n_partial), call.request_id), results.close)
    try:
        return JSONResponse(await cancel_on_disconnect(http.receive, call.full(n)))
    finally:
        results.close()


def _shape(body: ImageRequest, model: TokenModel) -> tuple[int, int, int]:
    if model.shape is None:
        raise invalid("model", model.name, "a pixel model", "use a model whose `picture` in /v1/models is not null")
    height, width, _ = model.shape
    if body.size not in (None, "auto", f"{width}x{height}"):
        raise invalid("size", body.size, f"{width}x{height}, the model's size", "omit it")
    n = math.prod(model.shape)
    if model.context is not None and n > model.context:
        needs = f"one whose context ({model.context}) holds the {n} values of an image"
        raise invalid("model", model.name, needs, "use another model")
    return model.shape


class _ImageCall:
    def __init__(self, shape: tuple[int, int, int], results: ResultStream, request_id: str) -> None:
        self._shape, self._results, self.request_id = shape, results, request_id
        self._created = int(time.time())

    async def full(self, n: int) -> ImagesAnswer:
        ids: list[list[int]] = [[] for _ in range(n)]
        async for i, event_ in self._results.events():
            self._take(ids[i], event_)
        data = [await to_thread.run_sync(encode_png, one, self._shape) for one in ids]
        return {
            "created": self._created,
            "data": [{"b64_json": one} for one in data],
            "output_format": "png",
            "size": self._size,
            "usage": _usage(sum(map(len, ids))),
        }

    async def stream(self, n_partial: int) -> AsyncGenerator[bytes, None]:
        ids: list[int] = []
        n_all, n_sent = math.prod(self._shape), 0
        async for _, event_ in self._results.events():
            self._take(ids, event_)
            # Evenly spaced partial images, without the complete one. Those that are due together are sent as one.
            n_due = len(ids) * (n_partial + 1) // n_all
            if n_sent < n_due and len(ids) < n_all:
                image = await to_thread.run_sync(encode_png, list(ids), self._shape)
                # The index is among those requested, so that it shows the progress even if some were merged.
                yield self._event("image_generation.partial_image", image, partial_image_index=n_due - 1)
                n_sent = n_due
        image = await to_thread.run_sync(encode_png, ids, self._shape)
        yield self._event("image_generation.completed", image, usage=_usage(len(ids)))

    def _take(self, ids: list[int], event_: Event) -> None:
        if isinstance(event_, TokensEvent):
            ids += [choice.token for choice in event_.tokens]
        elif isinstance(event_, Finished):
            check_finished(event_, self.request_id)

    def _event(self, name: str, image: str, **more: Any) -> bytes:
        data: Mapping[str, Any] = {
            "type": name,
            "b64_json": image,
            "created_at": self._created,
            "size": self._size,
            "quality": "auto",
            "background": "opaque",
            "output_format": "png",
            **more,
        }
        return event(data, name)

    @property
    def _size(self) -> str:
        return f"{self._shape[1]}x{self._shape[0]}"


def encode_png(ids: Sequence[int], shape: tuple[int, int, int]) -> str:
    """Return a PNG in base64; missing values are grey."""
    rest = math.prod(shape) - len(ids)
    ids_padded = np.concatenate([np.asarray(ids, np.int64), np.full(rest, FIRST_BYTE + SHEET_GREY, np.int64)])
    pixels, _ = ids_to_pixels(ids_padded, shape)
    return base64.b64encode(to_png(pixels)).decode()


def _usage(n_tokens: int) -> ImageUsage:
    return {"input_tokens": 0, "output_tokens": n_tokens, "total_tokens": n_tokens}
