"""Whatever goes wrong, in OpenAI's error object, with the status that tells a client whether to try again."""

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
"""So many wrong fields are named in one answer."""
NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients repeat what failed with 5xx, 408 or 409; this tells them that it is of no use."""


class ApiError(Exception):
    """Ends a call with this status."""

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
        return {"error": {"message": message, "type": _kind(self.status), "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


class ClientGone(Exception):
    """Nobody is there to answer any more."""


def as_problem(error: Exception) -> ApiError | None:
    """None for what nobody foresaw."""
    match error:
        case ApiError():
            return error
        case QueueFull():
            return too_many(str(error), "queue_full", error.retry_after)
        case Draining():
            return draining()
        case TooLong():  # OpenAI's code, which clients know
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
    message = "the server is about to stop and takes nothing new. Fix: try another server, or later."
    return ApiError(503, message, code="draining", headers={"retry-after": "5"})


def to_api_error(error: Exception, request_id: str) -> ApiError:
    """What the client is told; what nobody foresaw goes to the log with its trace."""
    problem = as_problem(error)
    if problem is None:
        FAILURES.error(json.dumps({"request_id": request_id, "failure": traceback.format_exception(error)}))
        message = f"the server failed; its log tells why under the request id {request_id}"
        problem = ApiError(500, message, code="internal")
    return problem


def of_ending(finished: TerminalEvent, request_id: str) -> ApiError | None:
    """None if the answer is whole."""
    match finished.reason:
        case "stop" | "length":
            return None
        case "stuck":
            message = f"the answer cannot go on: {finished.error or 'its grammar leaves no token'}"
            return ApiError(422, message, code="no_token_left")
        case "deadline":
            message = "the deadline passed before the answer was whole. Fix: allow more seconds, or ask for less."
            return ApiError(504, message, param="deadline_seconds", code="deadline", headers=NO_RETRY)
        case "cancelled":
            return ApiError(503, "the request was cancelled by the server. Fix: try again.", code="cancelled")
        case "error":
            FAILURES.error(json.dumps({"request_id": request_id, "failure": finished.error}))
            message = f"the engine failed on this request ({request_id}): {finished.error or 'no reason was given'}"
            return ApiError(500, message, code="engine")


def _invalid(error: ValidationError) -> ApiError:
    if error.error_count() > 1000:  # to tell them all would take long
        return ApiError(400, f"{error.error_count()} fields are wrong. Fix: see /openapi.json for those there are.")
    found = error.errors(include_url=False, include_context=False, include_input=False)
    # Errors of one field come once for each type it may have.
    reasons: dict[str, list[str]] = {}
    for one in found:
        name = str(one["loc"][0]) if one["loc"] else "the body"
        known = "unknown field" if one["type"] == "extra_forbidden" else one["msg"]
        reasons.setdefault(name, []).append(known)
    told = [f"{name[:100]}: {' or '.join(dict.fromkeys(why))}" for name, why in list(reasons.items())[:MAX_NAMED]]
    param = next(iter(reasons))
    return ApiError(
        400,
        f"{'; '.join(told)}. Fix: see /openapi.json for the fields and their bounds.",
        param=None if param == "the body" else param[:100],
        code="invalid_value",
    )


def _kind(status: int) -> str:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
