"""Parses the options of stages and requests. The error for an invalid option names the allowed values."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import TypeVar

from pydantic import JsonValue, TypeAdapter, ValidationError

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.plugins.descriptors import OptionSpec
from stagemesh.common.requests.request_checks import check_options
from stagemesh.common.wire.tensors import Value

Options = TypeVar("Options")


def parse_options(kind: type[Options], options: Mapping[str, JsonValue], *, stage: str) -> Options:
    """Parses a stage's options into the dataclass `kind`. Raises InvalidRequestError, which names the invalid option.

    `stage` is the stage's name in the error message. If `stage` is empty, the message does not name a stage.
    """
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            raise unknown_option(name, known, stage=stage)
    try:
        return TypeAdapter(kind).validate_python(dict(options))
    except ValidationError as exc:
        first = exc.errors()[0]
        name = ".".join(map(str, first["loc"])) or "options"
        raise InvalidRequestError(
            f"{_in(stage)}option {name} is {first['input']!r}: {first['msg']}",
            reason="INVALID_OPTION",
            metadata={"option": str(first["loc"][0])} if first["loc"] else {},
        ) from exc


def _in(stage: str) -> str:
    return f"stage {stage}: " if stage else ""


def unknown_option(name: str, known: Iterable[str], *, stage: str) -> InvalidRequestError:
    """Returns the error for an option whose name is not in `known`.

    The error's message lists similar known names. If none is similar, it lists up to 12 known names.
    """
    choices = sorted(known)
    near = get_close_matches(name, choices, n=3) or choices[:12]
    return InvalidRequestError(
        f"{_in(stage)}unknown option {name!r}; {'did you mean' if len(choices) > len(near) else 'known'}: "
        f"{', '.join(near) or 'none'}",
        reason="UNKNOWN_OPTION",
        metadata={"option": name},
    )


def request_options(given: Mapping[str, Value], specs: Mapping[str, OptionSpec], *, stage: str) -> dict[str, Value]:
    """Returns a request's options, with defaults for the options that the request omits.

    Raises InvalidRequestError if an option is unknown or its value is invalid.
    """
    return {name: spec.default for name, spec in specs.items()} | check_options(given, specs, owner=f"stage {stage}")
