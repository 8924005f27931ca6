"""The function engine, which runs a Python callable on batches of packets: its descriptor and its options."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, cast

from pydantic import Field, JsonValue

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.plugins.descriptors import EngineDescriptor, FunctionDescriptor, Signature
from stagemesh.common.plugins.entry_points import load_descriptor
from stagemesh.common.requests.request_checks import check_options, describe_allowed
from stagemesh.common.wire.tensors import Value
from stagemesh.services.engines.options import parse_options, unknown_option


@dataclass(frozen=True)
class OwnOptions:
    """The stage options that the engine itself reads. All other options are passed to the function."""

    max_batch: Annotated[int, Field(ge=1, strict=True)] = 32
    checkpoint_rows: Annotated[int, Field(ge=0, strict=True)] = 64


OWN = frozenset(field.name for field in fields(OwnOptions))


def own_options(options: Mapping[str, JsonValue], *, stage: str) -> OwnOptions:
    """Returns the options of the engine. Raises InvalidRequestError, which names the invalid option."""
    return parse_options(OwnOptions, {name: value for name, value in options.items() if name in OWN}, stage=stage)


def function_options(options: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """Returns the options that are passed to the function."""
    return {name: value for name, value in options.items() if name not in OWN}


def check_stage_options(descriptor: FunctionDescriptor, options: Mapping[str, JsonValue], *, stage: str) -> None:
    """Checks a stage's options by the function's descriptor, if it declares them.

    Raises InvalidRequestError, whose metadata contains the name of the invalid option.
    """
    own_options(options, stage=stage)
    declared, given = descriptor.stage_options, function_options(options)
    if declared is None:
        return
    for name, value in given.items():
        if name not in declared:
            raise unknown_option(name, (*OWN, *declared), stage=stage)
        if not isinstance(value, bool | int | float | str):
            raise InvalidRequestError(
                f"option {name!r} is {value!r}; it must be {describe_allowed(declared[name])}",
                reason="INVALID_OPTION",
                metadata={"option": name},
            )
    check_options(cast("Mapping[str, Value]", given), declared, owner="the function")


def _signature(function: str | None, options: Mapping[str, JsonValue]) -> Signature:
    assert function is not None, "the pipeline file must set `function` for this engine"
    descriptor = load_descriptor(FunctionDescriptor, function)
    check_stage_options(descriptor, options, stage="")
    return descriptor.signature


DESCRIPTOR = EngineDescriptor(
    factory="stagemesh.services.engines.function.engine:FunctionEngine",
    signature=_signature,
    needs_model=False,
    needs_function=True,
)
