"""A stage's `options` read into a dataclass, with errors that say what is allowed."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import TypeVar

from pydantic import JsonValue, TypeAdapter, ValidationError

from stagemesh.common.descriptors import OptionSpec
from stagemesh.common.errors import InvalidRequestError

Options = TypeVar("Options")


def parse_options(kind: type[Options], options: Mapping[str, JsonValue], *, stage: str) -> Options:
    """The options of a stage as the dataclass `kind`; raises InvalidRequestError naming the option at fault.

    `stage` is "" where nobody needs to be told whose they are.
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
    """Which stage; "" where the reader is told anyway."""
    return f"stage {stage}: " if stage else ""


def unknown_option(name: str, known: Iterable[str], *, stage: str) -> InvalidRequestError:
    """The error for an option that nobody reads; names those that come close, or all when they are few."""
    choices = sorted(known)
    near = get_close_matches(name, choices, n=3) or choices[:12]
    return InvalidRequestError(
        f"{_in(stage)}unknown option {name!r}; {'did you mean' if len(choices) > len(near) else 'known'}: "
        f"{', '.join(near) or 'none'}",
        reason="UNKNOWN_OPTION",
        metadata={"option": name},
    )


def request_options(given: Mapping[str, float], specs: Mapping[str, OptionSpec], *, stage: str) -> dict[str, float]:
    """What a request set for a stage, completed with the defaults; raises InvalidRequestError where out of bounds."""
    for name, value in given.items():
        spec = specs.get(name)
        if spec is None:
            raise unknown_option(name, specs, stage=stage)
        if not spec.minimum <= value <= spec.maximum:
            raise InvalidRequestError(
                f"stage {stage}: option {name} is {value:g}; it must be from {spec.minimum:g} to {spec.maximum:g}",
                reason="INVALID_OPTION",
            )
    return {name: spec.default for name, spec in specs.items()} | dict(given)
