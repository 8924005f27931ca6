"""The function engine, which runs a Python callable on batches of packets."""

from collections.abc import Mapping

from pydantic import JsonValue

from stagemesh.common.descriptors import EngineDescriptor, Signature, load_function_descriptor


def _signature(function: str | None, _options: Mapping[str, JsonValue]) -> Signature:
    assert function is not None, "the pipeline file must set `function` for this engine"
    return load_function_descriptor(function).signature


DESCRIPTOR = EngineDescriptor(
    factory="stagemesh.services.engines.function.engine:FunctionEngine",
    signature=_signature,
    needs_model=False,
    needs_function=True,
)
