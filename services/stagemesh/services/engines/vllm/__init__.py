"""The vllm engine: autoregressive stages on vLLM's own AsyncLLM, in which nothing of vLLM is copied."""

from collections.abc import Mapping

from pydantic import JsonValue

from stagemesh.connectors.tensors import TensorSpec
from stagemesh.services.engines.vllm.options import own_options
from stagemesh.services.serving.plugins import Emitted, EngineCard, Signature

_SAMPLED = {
    "text": Emitted(TensorSpec("uint8", ("bytes",)), kind="text"),
    "token_ids": Emitted(TensorSpec("int32", ("tokens",)), kind="tokens"),
}


def _signature(_function: str | None, options: Mapping[str, JsonValue]) -> Signature:
    states, adapters = own_options(options).hidden_states, bool(options.get("enable_lora"))
    if states is None:
        return Signature(emits=_SAMPLED, adapters=adapters)
    rows = Emitted(TensorSpec(states.dtype, ("tokens", "hidden")))
    return Signature(emits={**_SAMPLED, **dict.fromkeys(states.tensors, rows)}, adapters=adapters)


CARD = EngineCard(factory="stagemesh.services.engines.vllm.engine:VllmEngine", signature=_signature, needs_model=True)
