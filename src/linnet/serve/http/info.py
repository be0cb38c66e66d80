"""Routes for models, tokenization, health probes, metrics, and the playground page."""

from __future__ import annotations

from importlib import resources
from typing import cast

from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response

from linnet.models.bos import in_front
from linnet.serve.http.build_requests import check_ids, encode
from linnet.serve.http.errors import ApiError
from linnet.serve.http.limits import read_json
from linnet.serve.http.metrics import CONTENT_TYPE
from linnet.serve.http.model import PriorModel, TokenModel, is_prior
from linnet.serve.http.responses import JinjaCard, ModelCard, ModelList, PriorCard, TemplateCard, Text, Tokens
from linnet.serve.http.schemas import DetokenizeRequest, TokenizeRequest
from linnet.serve.http.service import Service
from linnet.tokenizers.base import decode_text

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data: blob:"
)
"""The page is self-contained, so it may not load anything from other origins."""


async def list_models(service: Service, http: HttpRequest) -> Response:
    answer: ModelList = {"object": "list", "data": [_card(model) for model in service.all_models]}
    return JSONResponse(answer)


async def show_model(service: Service, http: HttpRequest) -> Response:
    return JSONResponse(_card(service.any_model(http.path_params["id"])))


async def tokenize(service: Service, http: HttpRequest) -> Response:
    body = await read_json(http, TokenizeRequest, service.limits)
    model = service.model(body.model)
    ids = await encode(model, body.text, service.limits)
    if body.add_special_tokens:
        ids = (*in_front(model.bos_id, True), *ids)
    answer: Tokens = {"tokens": list(ids), "pieces": model.tokenizer.pieces(ids), "count": len(ids)}
    return JSONResponse(answer)


async def detokenize(service: Service, http: HttpRequest) -> Response:
    body = await read_json(http, DetokenizeRequest, service.limits)
    model = service.model(body.model)
    check_ids("tokens", body.tokens, model.tokenizer.n_vocab)
    answer: Text = {"text": decode_text(model.tokenizer, body.tokens)}
    return JSONResponse(answer)


async def health(service: Service, http: HttpRequest) -> Response:
    return JSONResponse({"status": "ok"})


async def ready(service: Service, http: HttpRequest) -> Response:
    if service.lifecycle.is_draining:
        return JSONResponse({"status": "draining"}, 503)
    return JSONResponse({"status": "ready"})


async def metrics(service: Service, http: HttpRequest) -> Response:
    return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE})


async def playground(service: Service, http: HttpRequest) -> Response:
    page = resources.files("linnet.serve") / "playground" / "index.html"
    if not page.is_file():
        raise ApiError(404, "this server has no playground. Fix: see /openapi.json for its endpoints.")
    return HTMLResponse(page.read_text(), headers={"content-security-policy": POLICY, "cache-control": "no-cache"})


def _card(model: TokenModel | PriorModel) -> ModelCard | PriorCard:
    return _prior_card(model) if is_prior(model) else _token_card(model)


def _prior_card(model: PriorModel) -> PriorCard:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "linnet",
        "fingerprint": model.fingerprint,
        "family": "prior",
        "width": model.width,
        "text_width": model.text_width,
        "timesteps": model.timesteps,
        "takes_text": model.takes_text,
        "max_encodings": model.max_encodings,
        "can_guide": model.can_guide,
        "gallery": model.gallery_rows,
        "pictures": model.has_images,
        "state_bytes": model.state_bytes,
    }


def _token_card(model: TokenModel) -> ModelCard:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "linnet",
        "fingerprint": model.fingerprint,
        "family": model.family,
        "n_vocab": model.n_vocab,
        "begin_id": model.bos_id,
        "end_id": model.tokenizer.eos_id,
        "tokenizer": {
            "kind": model.tokenizer.kind,
            "rules": model.tokenizer.rules,
            "byte_exact": model.tokenizer.exact,
        },
        "context": model.context,
        "state_bytes": model.state_bytes,
        "picture": None if model.shape is None else list(model.shape),
        "chat_template": cast(TemplateCard | JinjaCard, model.template.card()),
    }
