"""The function engine, which runs a Python callable on batches of packets."""

from collections.abc import Mapping

from pydantic import JsonValue

from stagemesh.common.descriptors import EngineDescriptor, Signature, load_function_descriptor
from stagemesh.services.engines.function.options import check_stage_options


def _signature(function: str | None, options: Mapping[str, JsonValue]) -> Signature:
    assert function is not None, "the pipeline file must set `function` for this engine"
    descriptor = load_function_descriptor(function)
    check_stage_options(descriptor, options, stage="")
    return descriptor.signature


DESCRIPTOR = EngineDescriptor(
    factory="stagemesh.services.engines.function.engine:FunctionEngine",
    signature=_signature,
    needs_model=False,
    needs_function=True,
)
