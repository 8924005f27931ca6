"""The function engine: any callable on batches of tensors."""

from collections.abc import Mapping

from pydantic import JsonValue

from stagemesh.services.serving.plugins import EngineCard, Signature, load_function_card


def _signature(function: str | None, _options: Mapping[str, JsonValue]) -> Signature:
    assert function is not None, "the pipeline file requires `function` of this engine"
    return load_function_card(function).signature


CARD = EngineCard(
    factory="stagemesh.services.engines.function.engine:FunctionEngine",
    signature=_signature,
    needs_model=False,
    needs_function=True,
)
