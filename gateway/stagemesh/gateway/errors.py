"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

import math
from collections.abc import Mapping
from http import HTTPStatus
from itertools import groupby
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.routing import Match, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from stagemesh.common.errors import Code, InternalError, InvalidRequestError, StagemeshError

_INVALID, _RATE_LIMIT, _SERVER = "invalid_request_error", "rate_limit_error", "server_error"
_STATUSES: Mapping[Code, tuple[int, str]] = {
    Code.INVALID_ARGUMENT: (400, _INVALID),
    Code.FAILED_PRECONDITION: (400, _INVALID),
    Code.UNIMPLEMENTED: (400, _INVALID),
    Code.UNAUTHENTICATED: (401, "authentication_error"),
    Code.PERMISSION_DENIED: (403, "permission_error"),
    Code.NOT_FOUND: (404, _INVALID),
    Code.ALREADY_EXISTS: (409, _INVALID),
    Code.ABORTED: (409, _INVALID),
    Code.RESOURCE_EXHAUSTED: (429, _RATE_LIMIT),
    Code.CANCELLED: (499, _INVALID),
    Code.UNAVAILABLE: (503, _SERVER),
    Code.DEADLINE_EXCEEDED: (504, _SERVER),
}
"""The HTTP status and OpenAI's type of error by the code of an error. Others are 500."""
_REASON_STATUSES: Mapping[str, tuple[int, str]] = {
    "MESSAGE_TOO_LARGE": (413, _INVALID),
    "STORAGE_FULL": (507, _SERVER),
    "STORE_DENIED": (500, _SERVER),
    "STORE_UNREACHABLE": (503, _SERVER),
}
"""The HTTP status and OpenAI's type of errors with these reasons, whatever their code."""
_MODEL_NOT_FOUND = "model_not_found"
_LOAD_REASONS = ("ADMISSION_LIMIT", "CALLER_LIMIT", "CALL_LIMIT", "OVERLOADED", "SESSION_LIMIT")
_CODES: Mapping[str, str] = {
    **dict.fromkeys(("UNKNOWN_PIPELINE", "UNKNOWN_ADAPTER"), _MODEL_NOT_FOUND),
    **dict.fromkeys(_LOAD_REASONS, "rate_limit_exceeded"),
    "PROMPT_TOO_LONG": "context_length_exceeded",
}
"""OpenAI's codes by the reason of an error. Other reasons are codes themselves, in lower case."""


class ParameterError(InvalidRequestError):
    """The error for a parameter of a request, by its name in OpenAI's API. The name is None for an event as a whole."""

    def __init__(
        self, param: str | None, message: str, *, reason: str = "INVALID_REQUEST", code: str | None = None
    ) -> None:
        """`code` is the code of OpenAI's that clients know, if it is not the reason in lower case."""
        super().__init__(f"{param}: {message}" if param else message, reason=reason)
        self.param, self.known_code = param, code


def error_body(error: StagemeshError) -> dict[str, Any]:
    """Returns an error as a JSON object: the body of a response, or the last event of a stream."""
    _, kind = _status_and_type(error)
    param, known_code = (error.param, error.known_code) if isinstance(error, ParameterError) else (None, None)
    code = known_code or _CODES.get(error.reason, error.reason.lower())
    if code == _MODEL_NOT_FOUND:
        param = "model"
    fields = {"message": error.message[:_MAX_TEXT], "type": kind, "param": param, "code": code}
    return {"error": {**fields, "reason": error.reason}}


def error_response(error: StagemeshError) -> JSONResponse:
    """Returns the HTTP response that reports an error, with its status and the time after which to retry."""
    status, _ = _status_and_type(error)
    headers = dict[str, str]()
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return JSONResponse(error_body(error), status, headers)


async def reject(error: StagemeshError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request, or a WebSocket that has not been accepted, with an error."""
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(error_response(error))
    else:
        await error_response(error)(scope, receive, send)


async def on_error(request: HTTPConnection, exc: Exception) -> JSONResponse:
    """Returns the response for an exception of a route.

    - A RequestValidationError is due to wrong parameters of a URL.
    - An HTTPException is due to an unknown path, or to a method that the path does not have.
    - A RecursionError is due to a value that is nested too deeply, such as a schema that an answer repeats.
    - Other exceptions than StagemeshErrors are defects of the gateway. Its server logs the traceback.
    """
    if isinstance(exc, RecursionError):
        exc = too_deep()
    if isinstance(exc, HTTPException):
        message = f"{exc.detail}{_hint(request)}" if exc.status_code == HTTPStatus.NOT_FOUND else exc.detail
        fields = {"message": message, "type": _INVALID, "param": None, "code": None}
        return JSONResponse({"error": fields}, exc.status_code, exc.headers)
    if isinstance(exc, StagemeshError):
        request.scope["sender"].reject(exc)
        return error_response(exc)
    if isinstance(exc, RequestValidationError):
        return error_response(validation_error(exc))
    return error_response(InternalError(f"an unexpected {type(exc).__name__}; the gateway's log has the details"))


def too_deep() -> InvalidRequestError:
    """Returns the error for a RecursionError, which a value of a body caused."""
    return InvalidRequestError("a value of the body is nested too deeply; nest it less")


async def reject_path(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request or a WebSocket to an unknown path."""
    unknown = HTTPException(HTTPStatus.NOT_FOUND)
    if scope["type"] != "websocket":
        raise unknown
    await WebSocket(scope, receive, send).send_denial_response(await on_error(HTTPConnection(scope), unknown))


def _hint(request: HTTPConnection) -> str:
    """Returns the end of the error for a path that is known under /v1, or nothing for another path."""
    scope = {**request.scope, "path": "/v1/" + request.scope["path"].rpartition("/v1/")[2].lstrip("/")}
    for route in request.app.routes:
        if isinstance(route, Route | WebSocketRoute) and route.matches(scope)[0] is not Match.NONE:
            return f"; did you mean {route.path}? The base URL of a client ends with /v1"
    return ""


MAX_PROBLEMS = 20
"""The number of wrong parameters that an error names."""
_MAX_NAME, _MAX_PROBLEM, _MAX_TEXT = 100, 300, 4096
TAG = "<"
"""The start of the name of a type in a union. It is not a part of the input."""


def validation_error(
    rejection: ValidationError | RequestValidationError, *, under: str = "", skip: int = 0
) -> InvalidRequestError:
    """Returns the error for values that pydantic rejects. Names the first 20 of them, but not what was given.

    `under` is the name of their object. `skip` is the number of parts of their names that are not in the input.
    """
    if isinstance(rejection, ValidationError):
        rejection = RequestValidationError(rejection.errors(include_url=False, include_input=False))
    problems = (_problem(error, under, skip) for error in rejection.errors()[:MAX_PROBLEMS])
    (param, first), *others = problems
    text = "; ".join((first, *(f"{name}: {text}" for name, text in others)))[:_MAX_TEXT]
    return ParameterError(param, text) if param else InvalidRequestError(text)


def _status_and_type(error: StagemeshError) -> tuple[int, str]:
    return _REASON_STATUSES.get(error.reason) or _STATUSES.get(error.code, (500, _SERVER))


def _problem(error: Mapping[str, Any], under: str, skip: int) -> tuple[str, str]:
    """Returns the name of a parameter, such as messages.0.content, and what is wrong with it."""
    given = (str(part)[:_MAX_NAME] for part in error["loc"][skip:])
    # The type of a part of a message is both the tag of its class and the name of its field.
    path = ".".join(part for part, _ in groupby((under, *given)) if part and not part.startswith(TAG))
    text = error["msg"]
    return path[:_MAX_PROBLEM], text[:1].lower() + text[1:_MAX_PROBLEM]
