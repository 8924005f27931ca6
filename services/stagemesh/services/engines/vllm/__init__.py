"""The vllm engine: autoregressive stages on vLLM's own AsyncLLM, in which nothing of vLLM is copied."""

from stagemesh.connectors.tensors import TensorSpec
from stagemesh.services.serving.plugins import Emitted, EngineCard, Signature

_SIGNATURE = Signature(emits={"text": Emitted(TensorSpec("uint8", ("bytes",)), kind="text")})


def _signature(_function: str | None) -> Signature:
    return _SIGNATURE


CARD = EngineCard(factory="stagemesh.services.engines.vllm.engine:VllmEngine", signature=_signature, needs_model=True)
