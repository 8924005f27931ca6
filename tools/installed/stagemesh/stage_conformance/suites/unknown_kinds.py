"""Items, locations and fields that the stage does not know as a consumer."""

from collections.abc import Callable
from typing import Any

from stagemesh.common.errors import Code
from stagemesh.stage_conformance.cases import case
from stagemesh.stage_conformance.content import GRPC, UNKNOWN_FIELD
from stagemesh.stage_conformance.suites.consumer import INPUT, complete, started
from stagemesh.stage_conformance.trial import Trial
from stagemesh.v1 import chunk_pb2, stage_pb2, tensor_pb2

_KINDS = "Versions and unknown kinds (checklist 22)"
_UNKNOWN = "UNKNOWN_KIND"


def _located(**location: Any) -> Callable[[Any], None]:
    def change(tensor: Any) -> None:
        for name, value in location.items():
            getattr(tensor, name).CopyFrom(value)

    return change


_LOCATIONS: dict[str, tuple[Callable[[Any], object], tuple[str, ...]]] = {
    "device": (_located(device=tensor_pb2.DeviceRegion(kind="cuda_ipc", size_bytes=4)), (_UNKNOWN,)),
    "ticket": (
        lambda tensor: (
            tensor.ClearField("dtype"),
            tensor.ClearField("shape"),
            tensor.handover.CopyFrom(tensor_pb2.Handover(kind="conformance.none", time_limit_s=5)),
        ),
        ("TICKET_REFUSED", _UNKNOWN),
    ),
    "unknown": (lambda tensor: (tensor.ClearField("inline"), tensor.MergeFromString(UNKNOWN_FIELD)), (_UNKNOWN,)),
    "none": (lambda tensor: tensor.ClearField("inline"), ("INVALID_CHUNK", _UNKNOWN)),
    "shm-over-grpc": (
        _located(shm=tensor_pb2.ShmRegion(size_bytes=4, generation=1)),
        ("INVALID_CHUNK", "STALE_REGION", _UNKNOWN),
    ),
}


@case("consumer.refuses-location", f"{_KINDS}: Tensor.location", INPUT, variants=_LOCATIONS)
async def refuses_location(trial: Trial, variant: tuple[Callable[[Any], object], tuple[str, ...]]) -> None:
    change, reasons = variant
    step, _, flow = await started(trial)
    data = trial.inputs.chunk(0, 4).inline()
    change(data.tensors[0])
    if data.tensors[0].WhichOneof("location") == "handover":
        data.size_bytes, data.lease_id = sum(len(each.inline) for each in data.tensors), 1
        data.tensors.append(data.tensors[0])
        del data.tensors[0]
    await flow.send_data(data, 0)
    await flow.rejected(None, *reasons)
    await step.failed(None)


def _unknown(message: Any) -> Any:
    message.MergeFromString(UNKNOWN_FIELD)
    return message


_KINDLESS: dict[str, tuple[Callable[[chunk_pb2.EdgeKey], stage_pb2.PutItem], tuple[str, ...]]] = {
    "no-content": (lambda key: _item(chunk=chunk_pb2.Chunk(key=key)), ("INVALID_CHUNK", _UNKNOWN)),
    "unknown-content": (lambda key: _item(chunk=_unknown(chunk_pb2.Chunk(key=key))), (_UNKNOWN,)),
    "unknown-item": (lambda key: _unknown(_item(key=key)), (_UNKNOWN,)),
}
_item = stage_pb2.PutItem


@case("consumer.refuses-item", f"{_KINDS}: PutItem, Chunk.content", INPUT, variants=_KINDLESS)
async def refuses_item(trial: Trial, variant: Any) -> None:
    make, reasons = variant
    _, stream, flow = await started(trial)
    await stream.put(make(flow.key))
    await flow.rejected(None, *reasons)


@case("consumer.ignorable-item", f"{_KINDS}: PutItem", INPUT)
async def ignorable_item(trial: Trial) -> None:
    step, stream, flow = await started(trial)
    await stream.put(_unknown(_item(key=flow.key, ignorable=True)), _unknown(_item(ignorable=True)))
    await complete(step, flow)


@case("consumer.unknown-item-without-key", f"{_KINDS}: PutItem", INPUT)
async def unknown_item_without_key(trial: Trial) -> None:
    stream = await trial.stream()
    await stream.put(_unknown(_item()))
    await stream.refused(Code.UNIMPLEMENTED, _UNKNOWN)


@case("consumer.unknown-fields", f"{_KINDS}: a field of a message is ignored", INPUT)
async def unknown_fields(trial: Trial) -> None:
    step, _ = await trial.start()
    producer = trial.producer()
    stream = await producer.raw_stream()
    hello = _unknown(producer.hello())
    _unknown(hello.protocol)
    await stream.put(hello=hello)
    await stream.until(lambda: stream.welcome, "`welcome`")
    flow = stream.flow(trial.key_in())
    await flow.put(open=_unknown(stage_pb2.OpenEdge(key=flow.key, connector=GRPC, opening=1)))
    await flow.opened(1)
    flow.sent[0] = data = _unknown(trial.inputs.chunk(0, 4).inline())
    _unknown(data.tensors[0])
    await flow.put(chunk=_unknown(chunk_pb2.Chunk(key=flow.key, seq=0, data=data)))
    await flow.acknowledged(1)
    await complete(step, flow)
