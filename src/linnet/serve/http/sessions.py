"""/v1/sessions: create, fork, save, restore and delete conversation states, which completions can continue."""

from __future__ import annotations

from anyio import to_thread
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from linnet.serve.http.errors import ApiError
from linnet.serve.http.limits import read_file, read_json
from linnet.serve.http.model import TokenModel
from linnet.serve.http.responses import Deleted, SessionCard
from linnet.serve.http.schemas import SessionRequest
from linnet.serve.http.service import Service
from linnet.serve.request import NoSession


async def create(service: Service, http: HttpRequest) -> Response:
    body = await read_json(http, SessionRequest, service.limits)
    model = service.model(body.model)
    return _card(model, await to_thread.run_sync(model.sessions.create))


async def show(service: Service, http: HttpRequest) -> Response:
    model, id = _find(service, http)
    return _card(model, id)


async def fork(service: Service, http: HttpRequest) -> Response:
    model, id = _find(service, http)
    return _card(model, await to_thread.run_sync(model.sessions.fork, id))


async def save(service: Service, http: HttpRequest) -> Response:
    model, id = _find(service, http)
    data = await to_thread.run_sync(model.sessions.save, id)
    headers = {"content-disposition": 'attachment; filename="session.safetensors"'}
    return Response(data, media_type="application/octet-stream", headers=headers)


async def restore(service: Service, http: HttpRequest) -> Response:
    unknown = set(http.query_params) - {"model"}
    if unknown:
        raise ApiError(400, f"{sorted(unknown)[0][:100]}: unknown field. Fix: omit it.")
    model = service.model(http.query_params.get("model"))
    data = await read_file(http, service.limits)
    return _card(model, await to_thread.run_sync(model.sessions.restore, data))


async def delete(service: Service, http: HttpRequest) -> Response:
    model, id = _find(service, http)
    model.sessions.acquire(id, http.scope["state"]["request_id"])
    try:
        await to_thread.run_sync(model.sessions.delete, id)
    finally:
        model.sessions.release(id)
    answer: Deleted = {"id": id, "object": "session", "deleted": True}
    return JSONResponse(answer)


def _find(service: Service, http: HttpRequest) -> tuple[TokenModel, str]:
    """Return a session's model and id. Ids are unique across models, so the call need not name the model."""
    id = http.path_params["id"]
    for model in service.models.values():
        try:
            model.sessions.n_tokens(id)
        except NoSession:
            continue
        return model, id
    raise NoSession(id)


def _card(model: TokenModel, id: str) -> Response:
    card: SessionCard = {
        "id": id,
        "object": "session",
        "model": model.name,
        "n_tokens": model.sessions.n_tokens(id),
        "state_bytes": model.state_bytes,
    }
    return JSONResponse(card)
