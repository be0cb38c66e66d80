"""Errors in OpenAI's format, with a status that determines whether clients retry."""

from __future__ import annotations

import json
import logging
import math
import traceback
from collections.abc import Mapping

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from linnet.core.errors import UserError
from linnet.serve.http.responses import Problem
from linnet.serve.request import AnswerLost, Draining, NoSession, QueueFull, SessionInUse, TerminalEvent, TooLong

FAILURES = logging.getLogger("linnet.failures")
MAX_MESSAGE = 2000
MAX_NAMED = 8
"""Maximum invalid fields listed in one error."""
NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients retry after 5xx, 408 and 409; this header prevents it where a retry is useless."""


class ApiError(Exception):
    """An error that ends a call with this status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    def body(self) -> Problem:
        message = str(self)
        if len(message) > MAX_MESSAGE:
            message = message[:MAX_MESSAGE] + "..."
        return {"error": {"message": message, "type": _error_type(self.status), "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


class ClientGone(Exception):
    """The client has disconnected."""


def expected_error(error: Exception) -> ApiError | None:
    """Convert an expected exception; returns None for an unexpected one."""
    match error:
        case ApiError():
            return error
        case QueueFull():
            return too_many(str(error), "queue_full", error.retry_after)
        case Draining():
            return draining()
        case TooLong():  # OpenAI's code, which clients recognize
            return ApiError(400, str(error), code="context_length_exceeded")
        case NoSession():
            return ApiError(404, str(error), param="session", code="session_not_found")
        case SessionInUse():
            return ApiError(409, str(error), param="session", code="session_in_use")
        case AnswerLost():
            return ApiError(503, str(error), param="session", code="answer_lost", headers=NO_RETRY)
        case UserError():
            return ApiError(400, str(error))
        case ValidationError():
            return _invalid(error)
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=error.headers)
        case _:
            return None


def too_many(message: str, code: str, retry_after: float) -> ApiError:
    return ApiError(429, message, code=code, headers={"retry-after": str(max(1, math.ceil(retry_after)))})


def draining() -> ApiError:
    message = "the server is shutting down and accepts no new requests. Fix: use another server, or try again later."
    return ApiError(503, message, code="draining", headers={"retry-after": "5"})


def to_api_error(error: Exception, request_id: str) -> ApiError:
    """Convert any exception to the client's error. An unexpected one is logged with its traceback and becomes a 500."""
    problem = expected_error(error)
    if problem is None:
        FAILURES.error(json.dumps({"request_id": request_id, "failure": traceback.format_exception(error)}))
        message = f"internal server error. Fix: see the server's log for request id {request_id}."
        problem = ApiError(500, message, code="internal")
    return problem


def check_finished(finished: TerminalEvent, request_id: str) -> None:
    """Raise the error of a finished request, unless its answer is complete."""
    match finished.reason:
        case "stop" | "length":
            return
        case "stuck":
            message = f"the answer cannot continue: {finished.error or 'its grammar allows no token'}"
            raise ApiError(422, message, code="no_token_left")
        case "deadline":
            message = "the deadline passed before the answer was complete. Fix: raise deadline_seconds, or request fewer tokens."
            raise ApiError(504, message, param="deadline_seconds", code="deadline", headers=NO_RETRY)
        case "cancelled":
            raise ApiError(503, "the server cancelled the request. Fix: try again.", code="cancelled")
        case "error":
            FAILURES.error(json.dumps({"request_id": request_id, "failure": finished.error}))
            message = f"the engine failed on this request ({request_id}): {finished.error or 'unknown reason'}"
            raise ApiError(500, message, code="engine")


def _invalid(error: ValidationError) -> ApiError:
    if error.error_count() > 1000:  # listing them all would take long
        return ApiError(
            400, f"{error.error_count()} fields are invalid. Fix: see /openapi.json for the fields and their bounds."
        )
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    # pydantic reports a field of a union type once per member.
    reasons: dict[str, list[str]] = {}
    for one in errors:
        name = str(one["loc"][0]) if one["loc"] else "the body"
        reason = "unknown field" if one["type"] == "extra_forbidden" else one["msg"]
        reasons.setdefault(name, []).append(reason)
    messages = [f"{name[:100]}: {' or '.join(dict.fromkeys(why))}" for name, why in list(reasons.items())[:MAX_NAMED]]
    param = next(iter(reasons))
    return ApiError(
        400,
        f"{'; '.join(messages)}. Fix: see /openapi.json for the fields and their bounds.",
        param=None if param == "the body" else param[:100],
        code="invalid_value",
    )


def _error_type(status: int) -> str:
    types = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return types.get(status, "server_error" if status >= 500 else "invalid_request_error")
