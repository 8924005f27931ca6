"""The policy for parameters that the gateway cannot apply: they pass, are ignored with a warning, or are an error.

- A parameter that a body declares as a field is applied. It is absent if it is null.
- A parameter of OpenAI's or vLLM's API that no field declares has a `Rule` in parameters.toml. It passes if
  it is null or has a neutral value, which is the API's documented default. Otherwise, the rule's effect decides.
- Any other parameter is unknown. It is an error that names the nearest known parameter, or a warning if the gateway's
  config says so (`unknown_parameters`).

A strict gateway has no warnings: each of them is an error.
"""

import json
import logging
import tomllib
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from prometheus_client import CollectorRegistry, Counter
from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stagemesh.gateway.config import GatewayConfig
from stagemesh.gateway.errors import MAX_PROBLEMS, ParameterError
from stagemesh.gateway.limits import CALLER

Effect: TypeAlias = Literal["accepted", "ignored", "refused"]


class Rule(NamedTuple):
    """The decision about a known parameter that the gateway cannot apply.

    - "accepted": it has no information for the pipeline, such as a part of an answer that a client sends back.
    - "ignored": the answer is right without it. The caller receives a warning.
    - "refused": the answer would be wrong without it.
    """

    effect: Effect
    neutral: tuple[object, ...] = ()
    """The values that have no effect, in addition to null."""
    remedy: str = "omit it"

    def is_neutral(self, value: object) -> bool:
        """Returns whether a value has no effect. A form contains numbers, flags and objects as JSON."""
        texts = (each if isinstance(each, str) else json.dumps(each) for each in self.neutral)
        return value is None or value in self.neutral or (isinstance(value, str) and value in {"", *texts})


Rules: TypeAlias = Mapping[str, Rule]


def _read_rules() -> dict[str, dict[str, Rule]]:
    sections = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return {
        section: {
            name: Rule(effect, tuple(neutral), effects.get("remedy", {}).get(name, "omit it"))
            for effect in get_args(Effect)
            for name, neutral in effects.get(effect, {}).items()
        }
        for section, effects in sections.items()
    }


RULES: Mapping[str, Rules] = _read_rules()
"""The rules of parameters.toml, by section and parameter."""


class Policy:
    """An ASGI middleware that reports the warnings of each request.

    A warning is an entry of the response's header `Stagemesh-Warnings`. It is logged once for each caller and
    parameter, and counted.
    """

    def __init__(self, app: ASGIApp, config: GatewayConfig, registry: CollectorRegistry) -> None:
        self.strict = config.strict
        self.permits_unknown = config.unknown_parameters == "warn" and not config.strict
        self._app = app
        self._logged = set[tuple[str, str]]()
        self._ignored = Counter(
            "stagemesh_gateway_ignored_parameters",
            "Parameters of requests that had no effect, by name.",
            ["parameter"],
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        texts = dict[str, str]()
        _REQUEST.set(_Request(self, texts))

        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start" and texts:
                header = "; ".join(texts.values()).encode("ascii", "replace")[:_MAX_HEADER]
                MutableHeaders(scope=message)[_HEADER] = header.decode()
            await send(message)

        await self._app(scope, receive, send_with_header)

    def report(self, name: str, text: str, *, known: bool) -> None:
        """Counts and logs a warning."""
        self._ignored.labels(name if known else "unknown").inc()
        key = (CALLER.get(), name)
        if key not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(key)
            _log.warning("caller %r: %s", CALLER.get(), text)


class _Request(NamedTuple):
    """The policy for a request, and its warnings by parameter."""

    policy: Policy
    texts: dict[str, str]


_REQUEST = ContextVar[_Request | None]("request", default=None)
"""The request that is served, or None outside of requests."""
_HEADER, _MAX_HEADER = "Stagemesh-Warnings", 1024
_MAX_NAME, _MAX_LOGGED = 100, 10_000
_log = logging.getLogger(__name__)


def warnings_field() -> dict[str, list[str]]:
    """Returns the field `warnings` of an answer. Empty if the request has no warnings."""
    request = _REQUEST.get()
    return {"warnings": list(request.texts.values())} if request is not None and request.texts else {}


def add_stage_warnings(texts: Iterable[str]) -> None:
    """Adds warnings of stages about results that exist already, such as a rounded size. A strict gateway also accepts
    these.
    """
    request = _REQUEST.get()
    if request is not None:
        request.texts.update((text, text) for text in texts)


def warn(name: str, text: str) -> None:
    """Warns the caller that a parameter has no effect. Raises ParameterError if the gateway is strict."""
    if problem := ignore(name, text):
        raise ParameterError(name, problem)


@contextmanager
def collected_warnings() -> Generator[Mapping[str, str]]:
    """Collects the warnings within the block, by parameter. They are not warnings of the request then."""
    request, texts = _REQUEST.get(), dict[str, str]()
    token = _REQUEST.set(None if request is None else request._replace(texts=texts))
    try:
        yield texts
    finally:
        _REQUEST.reset(token)


def apply_rule(rule: Rule, name: str, value: object, *, param: str) -> None:
    """Decides about a parameter of a model that cannot apply it.

    Raises ParameterError for `param` if the answer would be wrong without it, or if the gateway is strict.
    """
    if problem := _decide(rule, name, value):
        raise ParameterError(param, problem)


def apply_policy(
    given: Mapping[str, Any], declared: Collection[str], known: Rules, *, within: str = ""
) -> Mapping[str, Any]:
    """Returns the parameters of an object that its body declares, without those that are null.

    `within` precedes their names in warnings. Raises pydantic's ValidationError if others are neither accepted nor
    ignored.
    """
    if all(name in declared and value is not None for name, value in given.items()):
        return given
    kept, errors = dict[str, Any](), list[InitErrorDetails]()
    for name, value in given.items():
        if name in declared:
            if value is not None:
                kept[name] = value
        elif len(errors) < MAX_PROBLEMS:
            rule = known.get(name)
            path = within + name
            problem = _unknown(path, [*declared, *known]) if rule is None else _decide(rule, path, value)
            if problem:
                error = PydanticCustomError("parameter", "{problem}", {"problem": problem})
                errors.append({"type": error, "loc": (name,), "input": None})
    if errors:
        raise ValidationError.from_exception_data("parameters", errors)
    return kept


def _decide(rule: Rule, name: str, value: object) -> str:
    """Returns why a known parameter is an error, or an empty text if it is none."""
    if rule.effect == "accepted" or rule.is_neutral(value):
        return ""
    if rule.effect == "refused":
        return f"it is not supported, and the answer would be wrong without it; {rule.remedy}"
    return ignore(name, "is not supported and was ignored")


def _unknown(name: str, known: Collection[str]) -> str:
    request, name = _REQUEST.get(), name[:_MAX_NAME]
    permitted = request is not None and request.policy.permits_unknown
    if request is not None and permitted and len(request.texts) >= MAX_PROBLEMS:
        return ""
    close = get_close_matches(name.rpartition(".")[2], known, n=1)
    problem = f"is unknown (did you mean {close[0]}?)" if close else "is unknown"
    return ignore(name, f"{problem} and was ignored", known=False) if permitted else f"this parameter {problem}"


def ignore(name: str, text: str, *, known: bool = True) -> str:
    """Warns the caller that a parameter has no effect. Returns the problem instead if the gateway is strict."""
    request = _REQUEST.get()
    if request is not None and request.policy.strict:
        return "it is not supported, and this gateway ignores no parameter (strict); omit it"
    if request is not None and name not in request.texts and len(request.texts) < MAX_PROBLEMS:
        request.texts[name] = f"{name!a} {text}"
        request.policy.report(name, request.texts[name], known=known)
    return ""
