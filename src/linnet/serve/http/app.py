"""The route table, and the Starlette app built from it."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from linnet.core.errors import invalid
from linnet.core.version import __version__
from linnet.serve.http import images, info, openai_text, priors, responses, schemas, sessions
from linnet.serve.http.auth import AllowedHosts, ApiKeys
from linnet.serve.http.errors import ApiError, to_api_error
from linnet.serve.http.lifecycle import Lifecycle
from linnet.serve.http.limits import Calls, Limits
from linnet.serve.http.metrics import Metrics
from linnet.serve.http.middleware import RequestMiddleware
from linnet.serve.http.model import PriorModel, TokenModel
from linnet.serve.http.openapi import Endpoint, describe
from linnet.serve.http.service import Service

FILE = "application/octet-stream"


async def _document(service: Service, http: HttpRequest) -> Response:
    return JSONResponse(describe(ENDPOINTS, __version__))


ENDPOINTS = (
    Endpoint("GET", "/v1/models", info.list_models, "List the models", gives=responses.ModelList),
    Endpoint(
        "GET",
        "/v1/models/{id:path}",
        info.show_model,
        "Describe a model",
        gives=responses.ModelCard | responses.PriorCard,
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        openai_text.completions,
        "Complete a text",
        takes=schemas.CompletionRequest,
        gives=responses.TextAnswer,
        streams=True,
    ),
    Endpoint(
        "POST",
        "/v1/chat/completions",
        openai_text.chat,
        "Complete a chat",
        takes=schemas.ChatRequest,
        gives=responses.ChatAnswer,
        streams=True,
    ),
    Endpoint(
        "POST",
        "/v1/images/generations",
        images.images,
        "Generate images",
        takes=schemas.ImageRequest,
        gives=responses.ImagesAnswer,
        streams=True,
    ),
    Endpoint(
        "POST",
        "/v1/priors/sample",
        priors.sample,
        "Predict image embeddings from text",
        takes=schemas.PriorRequest,
        gives=responses.PriorAnswer,
        streams=True,
    ),
    Endpoint(
        "POST",
        "/v1/tokenize",
        info.tokenize,
        "Encode a text to token ids",
        takes=schemas.TokenizeRequest,
        gives=responses.Tokens,
    ),
    Endpoint(
        "POST",
        "/v1/detokenize",
        info.detokenize,
        "Decode token ids to text",
        takes=schemas.DetokenizeRequest,
        gives=responses.Text,
    ),
    Endpoint(
        "POST",
        "/v1/sessions",
        sessions.create,
        "Create a session",
        takes=schemas.SessionRequest,
        gives=responses.SessionCard,
    ),
    Endpoint(
        "POST",
        "/v1/sessions/restore",
        sessions.restore,
        "Restore a session from a file",
        takes="file",
        gives=responses.SessionCard,
        query=("model",),
    ),
    Endpoint("GET", "/v1/sessions/{id}", sessions.show, "Describe a session", gives=responses.SessionCard),
    Endpoint(
        "DELETE", "/v1/sessions/{id}", sessions.delete, "Delete a session", gives=responses.Deleted, statuses=(409,)
    ),
    Endpoint("POST", "/v1/sessions/{id}/fork", sessions.fork, "Fork a session", gives=responses.SessionCard),
    Endpoint("GET", "/v1/sessions/{id}/state", sessions.save, "Save a session to a file", gives=FILE),
    Endpoint("GET", "/health", info.health, "Liveness probe", gives=responses.Status, is_open=True),
    Endpoint("GET", "/ready", info.ready, "Readiness probe", gives=responses.Status, is_open=True, statuses=(503,)),
    Endpoint("GET", "/metrics", info.metrics, "Prometheus metrics", gives="text/plain"),
    Endpoint("GET", "/openapi.json", _document, "The OpenAPI document", gives=dict),
    Endpoint("GET", "/", info.playground, "The playground page", gives="text/html"),
)


def make_app(
    models: Sequence[TokenModel | PriorModel],
    *,
    keys: Sequence[str],
    limits: Limits | None = None,
    lifecycle: Lifecycle | None = None,
    clock: Callable[[], float] = time.monotonic,
    host: str | None = None,
    is_replica: bool = False,
) -> Starlette:
    """Build the app. Without API keys any client may connect, but the Host header must be a loopback name or `host`.

    `clock` must be the engine's, because deadlines are measured on it. A replica is called only by its front, which assigns the
    request ids and limits concurrent calls.
    """
    by_name = {model.name: model for model in models}
    if not models or len(by_name) < len(models):
        names = [model.name for model in models]
        raise invalid("models", names, "at least one, with unique names", "rename one")
    limits, lifecycle, metrics = limits or Limits(), lifecycle or Lifecycle(), Metrics(models)
    service = Service(all_models=tuple(models), limits=limits, metrics=metrics, lifecycle=lifecycle, clock=clock)
    middleware = Middleware(
        RequestMiddleware,
        keys=ApiKeys(keys),
        allowed_hosts=AllowedHosts(None if keys else host),
        calls=Calls(sys.maxsize if is_replica else limits.calls_per_key),
        lifecycle=lifecycle,
        metrics=metrics,
        is_replica=is_replica,
    )
    return Starlette(
        routes=[Route(one.path, _route(service, one), methods=[one.method]) for one in ENDPOINTS],
        middleware=[middleware],
        exception_handlers={HTTPException: no_route},
    )


def _route(service: Service, endpoint: Endpoint) -> Callable[[HttpRequest], Awaitable[Response]]:
    return partial(endpoint.handler, service)


async def no_route(http: HttpRequest, error: Exception) -> Response:
    problem = to_api_error(error, http.scope["state"]["request_id"])
    messages = {404: "unknown path", 405: "method not allowed for this path"}
    message = messages.get(problem.status, str(problem))
    return ApiError(
        problem.status, f"{message}. Fix: see /openapi.json for the endpoints.", headers=problem.headers
    ).response()
