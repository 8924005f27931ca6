"""Reads the options of `stagemesh bench`: the server, the loads, the requests and the limits."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import typer

from stagemesh.bench.command_options import API_KEY, BENCH, DEFAULT_PROMPT
from stagemesh.bench.loads import Load, LoadSettings
from stagemesh.bench.measurements import FIGURES
from stagemesh.bench.settings import Arrivals, Endpoint, HttpSettings
from stagemesh.bench.targets import MixedRequest, PipelineTarget, Target, read_requests
from stagemesh.cli.requests.request_options import client_arguments, typed_value
from stagemesh.cli.terminal.contexts import split_addresses
from stagemesh.cli.terminal.options import read_pairs
from stagemesh.common.errors import needs_extra
from stagemesh.common.process.settings import library_variable

_MODALITIES = ("text", "audio")
_DEFAULT_REQUESTS = 100
_HTTP_ONLY = ("model", "endpoint", "modalities", "sample_rate", "api_key_env")
_PIPELINE_ONLY = ("outputs", "stage_parameters", "ignore_eos", "priority", "caller")
_CHAT_ONLY = ("modalities", "max_tokens", "temperature")

_Number = TypeVar("_Number", int, float)


def read_target(values: Mapping[str, Any], mix: Sequence[MixedRequest]) -> Callable[[], Target]:
    """Returns the function that connects to the server. It must be called while an event loop runs.

    Raises BadParameter if options contradict each other or are malformed.
    """
    if values["openai"] is not None:
        return _read_http_target(values, mix)
    _reject(values, _HTTP_ONLY, "it needs --openai URL")
    # Each request has a seed of its own.
    arguments = client_arguments({name: value for name, value in values.items() if name != "seed"})
    endpoints = split_addresses(values["server"])
    return lambda: PipelineTarget(endpoints, arguments, timeout_s=values["timeout"])


def _read_http_target(values: Mapping[str, Any], mix: Sequence[MixedRequest]) -> Callable[[], Target]:
    with needs_extra("bench", of="`stagemesh bench`"):
        from stagemesh.bench.openai_target import OpenAITarget

    if not values["openai"].startswith(("http://", "https://")):
        raise typer.BadParameter(
            f"it is {values['openai']!r}; give a URL such as http://127.0.0.1:8000", param_hint="--openai"
        )
    if values["model"] is None:
        raise typer.BadParameter("it is missing; --openai needs it", param_hint="--model")
    _reject(values, _PIPELINE_ONLY, "it contradicts --openai; set fields of the body with --option")
    if values["endpoint"] is Endpoint.SPEECH:
        _reject(values, _CHAT_ONLY, "it contradicts --endpoint speech; set fields of the body with --option")
        if any(request.prompt is None or request.max_tokens or request.outputs for request in mix):
            raise typer.BadParameter(
                "--endpoint speech needs lines with prompt, without max_tokens and outputs",
                param_hint="--requests-file",
            )
    modalities = tuple(each.strip() for each in values["modalities"].split(","))
    if not set(modalities) <= set(_MODALITIES):
        raise typer.BadParameter(f"it is {values['modalities']!r}; give text, or text,audio", param_hint="--modalities")
    settings = HttpSettings(
        url=values["openai"],
        model=values["model"],
        endpoint=values["endpoint"],
        modalities=modalities,
        sample_rate_hz=values["sample_rate"],
        timeout_s=values["timeout"],
        api_key=_read_api_key(values["api_key_env"]),
        max_tokens=values["max_tokens"],
        temperature=values["temperature"],
        options=read_pairs(values["options"], option="--option", convert=typed_value),
    )
    return lambda: OpenAITarget(settings)


def _reject(values: Mapping[str, Any], names: Sequence[str], message: str) -> None:
    """Raises BadParameter with `message` if one of these parameters differs from its default."""
    for name in names:
        if values[name] != BENCH[name].default:
            raise typer.BadParameter(message, param_hint=f"--{name.replace('_', '-')}")


def _read_api_key(variable: str | None) -> str:
    key = library_variable(variable or API_KEY)
    if variable and not key:
        raise typer.BadParameter(f"the environment variable {variable} is not set", param_hint="--api-key-env")
    return key


def read_loads(values: Mapping[str, Any]) -> list[Load]:
    """Returns the loads of the sweep. Raises BadParameter if a number is invalid or options contradict each other."""
    if values["arrivals"] is not Arrivals.BURST:
        _reject(values, ("burst",), "it needs --arrivals burst")
    if values["rate"] is None:
        _reject(values, ("arrivals",), "it needs --rate")
        numbers = _read_numbers(values["concurrency"] or "1", int, option="--concurrency")
        return [Load(concurrency=number) for number in numbers]
    if values["concurrency"] is not None:
        raise typer.BadParameter("give either --concurrency or --rate", param_hint="--rate")
    return [Load(rate_per_s=rate) for rate in _read_numbers(values["rate"], float, option="--rate")]


def _read_numbers(text: str, convert: Callable[[str], _Number], *, option: str) -> list[_Number]:
    try:
        numbers = [convert(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < each < float("inf") for each in numbers):
        raise typer.BadParameter(f"it is {text!r}; give numbers greater than 0, separated by commas", param_hint=option)
    return numbers


def read_settings(values: Mapping[str, Any]) -> LoadSettings:
    """Returns the settings of all loads.

    Raises BadParameter if options contradict each other, and InvalidRequestError if the requests file is invalid.
    """
    requests, duration_s = values["requests"], values["duration"]
    if requests is not None and duration_s is not None:
        raise typer.BadParameter("give either --requests or --duration", param_hint="--duration")
    if requests is None and duration_s is None:
        requests = _DEFAULT_REQUESTS
    return LoadSettings(
        mix=_read_mix(values),
        seed=values["seed"],
        requests=requests,
        duration_s=duration_s,
        arrivals=values["arrivals"],
        burst=values["burst"],
    )


def _read_mix(values: Mapping[str, Any]) -> list[MixedRequest]:
    if values["requests_file"] is None:
        return [MixedRequest(prompt=prompt) for prompt in values["prompt"] or [DEFAULT_PROMPT]]
    if values["prompt"]:
        raise typer.BadParameter("give either --prompt or --requests-file", param_hint="--requests-file")
    return read_requests(values["requests_file"])


def read_limits(texts: Sequence[str] | None) -> dict[str, float]:
    """Returns the limits by the name of their figure. Raises BadParameter if one is unknown or invalid."""
    limits = read_pairs(texts, option="--limit", convert=float)
    for name, limit in limits.items():
        if name not in FIGURES:
            raise typer.BadParameter(f"unknown figure {name!r}; known: {', '.join(FIGURES)}", param_hint="--limit")
        if not limit >= 0:
            raise typer.BadParameter(f"{name} is {limit:g}; it must be at least 0", param_hint="--limit")
    return limits
