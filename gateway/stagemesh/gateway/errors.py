"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

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
_STORE_STATUSES: Mapping[str, int] = {"STORAGE_FULL": 507, "STORE_DENIED": 500, "STORE_UNREACHABLE": 503}
"""The HTTP status of errors of a store by their reason, which the caller cannot remedy."""
_MODEL_REASONS = frozenset({"UNKNOWN_PIPELINE", "UNKNOWN_ADAPTER"})
"""The reasons with OpenAI's code model_not_found. Other reasons are codes themselves, in lower case."""


class ParameterError(InvalidRequestError):
    """The error for a parameter of a request, by its name in OpenAI's API."""

    def __init__(self, param: str, message: str, *, reason: str = "INVALID_REQUEST") -> None:
        super().__init__(f"{param}: {message}", reason=reason)
        self.param = param


class RealtimeError(InvalidRequestError):
    """An error of the realtime API for which clients know a code of OpenAI's."""

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.known_code, self.param = code, param


def error_body(error: StagemeshError) -> dict[str, Any]:
    """Returns an error as a JSON object: the body of a response, or the last event of a stream."""
    _, kind = _status_and_type(error)
    param, code = error.param if isinstance(error, ParameterError) else None, error.reason.lower()
    if isinstance(error, RealtimeError):
        param, code = error.param, error.known_code
    elif error.reason in _MODEL_REASONS:
        param, code = "model", "model_not_found"
    return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


def error_response(error: StagemeshError) -> JSONResponse:
    """Returns the HTTP response that reports an error, with its status and the time after which to retry."""
    status, _ = _status_and_type(error)
    headers = dict[str, str]()
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return JSONResponse(error_body(error), status, headers)


async def on_stagemesh_error(_request: Request, exc: Exception) -> JSONResponse:
    """Handles a StagemeshError that a route raises."""
    assert isinstance(exc, StagemeshError)
    return error_response(exc)


async def on_invalid_body(_request: Request, exc: Exception) -> JSONResponse:
    """Handles a body that is not JSON, or that has unknown, missing or wrong parameters. Names each of them."""
    assert isinstance(exc, RequestValidationError)
    return error_response(validation_error(exc.errors()))


def validation_error(errors: Sequence[Mapping[str, Any]], *, under: str = "") -> StagemeshError:
    """Returns the error for values that pydantic rejects. Names each of them. `under` is the name of their object."""
    problems = [_problem(error, under) for error in errors]
    if not problems[0][0]:
        return InvalidRequestError("; ".join(text for _, text in problems))
    (param, first), *others = problems
    return ParameterError(param, "; ".join((first, *(f"{name}: {text}" for name, text in others))))


async def on_http_error(_request: Request, exc: Exception) -> JSONResponse:
    """Handles an unknown path, and a method that it does not have."""
    assert isinstance(exc, HTTPException)
    fields = {"message": exc.detail, "type": _INVALID, "param": None, "code": None}
    return JSONResponse({"error": fields}, exc.status_code, exc.headers)


async def on_defect(_request: Request, exc: Exception) -> JSONResponse:
    """Handles an exception that is a defect of the gateway. Its server logs the traceback."""
    return error_response(InternalError(f"an unexpected {type(exc).__name__}; the gateway's log has the details"))


def _status_and_type(error: StagemeshError) -> tuple[int, str]:
    if error.reason in _STORE_STATUSES:
        return _STORE_STATUSES[error.reason], _SERVER
    return _STATUSES.get(error.code, (500, _SERVER))


def _problem(error: Mapping[str, Any], under: str) -> tuple[str, str]:
    """Returns the name of a parameter, such as messages.0.content, and what is wrong with it."""
    path = [str(part) for part in ((under,) if under else ()) + tuple(error["loc"]) if part != "body"]
    if error["type"] == "json_invalid":
        return "", f"the body is not JSON: {error['ctx']['error']}"
    if error["type"] == "extra_forbidden":
        return ".".join(path), "this parameter is not supported"
    given = json.dumps(error.get("input"), default=str)[:100]
    text = error["msg"][0].lower() + error["msg"][1:]
    return ".".join(path), text if error["type"] == "missing" else f"{text}, but it is {given}"
