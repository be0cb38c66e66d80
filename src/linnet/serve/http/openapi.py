"""/openapi.json, generated from the route table and the request and response types, so that it cannot become outdated."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from linnet.serve.http.responses import Problem
from linnet.serve.http.service import Service

Handler = Callable[[Service, HttpRequest], Awaitable[Response]]
REF = "#/components/schemas/{model}"
ERRORS = {
    400: "A field is invalid or unknown",
    401: "The API key is missing or invalid",
    403: "The Host header does not name this server",
    404: "Not found",
    405: "Method not allowed",
    408: "The request body arrived too slowly",
    409: "The session is in use",
    413: "The request body is too large",
    415: "Unsupported media type",
    422: "The constraints of the request allow no token",
    429: "Too many requests; see Retry-After",
    431: "The request headers are too large",
    500: "Internal server error",
    503: "The server is shutting down, or a replica has failed",
    504: "The deadline has passed",
}
MIDDLEWARE_ERRORS = (403, 431)
"""Errors of the middleware, which probes can also receive."""
ERRORS_WITHOUT_BODY = (400, 401, 403, 404, 405, 429, 431, 500, 503)


@dataclasses.dataclass(frozen=True)
class Endpoint:
    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Handler
    summary: str
    takes: type[BaseModel] | Literal["file"] | None = None
    gives: Any = None
    """A type for a JSON response, or a media type."""
    streams: bool = False
    is_open: bool = False
    query: tuple[str, ...] = ()
    statuses: tuple[int, ...] = ()
    """Additional error statuses of this endpoint."""


def describe(endpoints: Sequence[Endpoint], version: str) -> Mapping[str, Any]:
    schemas: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    bodies = {one.takes for one in endpoints if isinstance(one.takes, type)}
    if bodies:
        pairs: list[tuple[type[BaseModel], Literal["validation"]]] = [
            (kind, "validation") for kind in sorted(bodies, key=lambda kind: kind.__name__)
        ]
        schemas |= models_json_schema(pairs, ref_template=REF)[1]["$defs"]
    for one in endpoints:
        path = re.sub(r":\w+}", "}", one.path)
        paths.setdefault(path, {})[one.method.lower()] = _operation(one, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Linnet",
            "version": version,
            "description": "OpenAI-compatible API, with sessions of constant size.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(one: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": one.summary,
        "operationId": one.handler.__module__.rpartition(".")[2] + "_" + one.handler.__name__,
        "responses": _responses(one, schemas),
        "security": [] if one.is_open else [{"key": []}],
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)", one.path)
    ]
    parameters += [{"name": name, "in": "query", "schema": {"type": "string"}} for name in one.query]
    if parameters:
        operation["parameters"] = parameters
    if one.takes == "file":
        operation["requestBody"] = {"required": True, "content": {"application/octet-stream": {"schema": _BINARY}}}
    elif one.takes is not None:
        schema = {"$ref": REF.format(model=one.takes.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


_BINARY = {"type": "string", "format": "binary"}
# Tools interpret the schema of a stream as that of each event.
_EVENT = {
    "type": "object",
    "description": "One server-sent event",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}


def _responses(one: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    if isinstance(one.gives, str):
        success = {one.gives: {"schema": _BINARY if one.gives == "application/octet-stream" else {"type": "string"}}}
    else:
        success = {"application/json": {"schema": _schema(one.gives, schemas)}}
    if one.streams:
        success["text/event-stream"] = {"schema": _EVENT}
    problem = {"application/json": {"schema": _schema(Problem, schemas)}}
    statuses = tuple(ERRORS) if one.takes is not None else (*ERRORS_WITHOUT_BODY, *one.statuses)
    if one.is_open:
        status = {"application/json": {"schema": _schema(one.gives, schemas)}}
        extra = {str(code): {"description": ERRORS[code], "content": status} for code in one.statuses}
        rejected = {str(code): {"description": ERRORS[code], "content": problem} for code in MIDDLEWARE_ERRORS}
        return {"200": {"description": "Success", "content": success}, **extra, **rejected}
    errors = {str(code): {"description": ERRORS[code], "content": problem} for code in statuses}
    return {"200": {"description": "Success", "content": success}, **errors}


def _schema(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    if kind is dict:
        return {"type": "object"}
    schema = TypeAdapter(kind).json_schema(ref_template=REF, mode="serialization")
    schemas |= schema.pop("$defs", {})
    if not isinstance(kind, type):  # a union
        return schema
    schemas[kind.__name__] = schema
    return {"$ref": REF.format(model=kind.__name__)}
