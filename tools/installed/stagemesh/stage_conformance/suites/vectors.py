"""The test vectors of steps, chunks, texts, chunk policies, rows and replies (protos/vectors)."""

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import json_format

from stagemesh.common.errors import Code
from stagemesh.stage_conformance.cases import RECOVERY, Needs, answer_of, case, expect, expect_equal
from stagemesh.stage_conformance.content import ITEM_BYTES, UNACCEPTED, UNKNOWN_FIELD, Payload, read_vectors
from stagemesh.stage_conformance.played_consumer import Consumer
from stagemesh.stage_conformance.played_producer import Flow
from stagemesh.stage_conformance.suites.consumer import complete, started
from stagemesh.stage_conformance.suites.producer import delivered, sending
from stagemesh.stage_conformance.trial import FRAMES, Good, Trial, expect_contents, require
from stagemesh.v1 import chunk_pb2, signature_pb2, stage_pb2, tensor_pb2

# -- steps that are refused


@case("steps.refuses", "A step: reject what you do not know or cannot do (checklist 8)", variants=read_vectors("steps"))
async def refused_step(trial: Trial, vector: Mapping[str, Any]) -> None:
    signature, is_output = trial.stage.described.signature, "output" in vector
    require(not is_output or trial.stage.has_output, "the stage has no outgoing edge")
    require("input" not in vector or trial.inputs.tensors, "the stage has no incoming edge")
    require("if" not in vector or getattr(signature, vector["if"]), "the signature does not have it")
    require("unless" not in vector or not getattr(signature, vector["unless"]), "the signature allows it")
    request = trial.request(await trial.consumer() if is_output else None)
    merge(vector.get("change", {}), request)
    for part, named in (("input", request.inputs), ("output", request.outputs), ("streamed", request.streamed)):
        if part in vector:
            merge(vector[part], named[0])
    if "unknown_field" in vector:
        *parents, last = vector["unknown_field"].split(".")
        parent: Any = request
        for each in parents:
            parent = getattr(parent, each)[0] if each == "outputs" else getattr(parent, each)
        getattr(parent, last).MergeFromString(UNKNOWN_FIELD)
    error = await trial.refused(request, Code[vector["code"]] if "code" in vector else None, *vector["reasons"])
    expect_equal("the metadata `stage`", trial.stage.described.stage, error.metadata.get("stage"))


def merge(change: Mapping[str, Any], message: Any) -> None:
    """Sets the fields of a message that `change` has, as proto JSON. A list or an empty message replaces the field."""
    for name, value in change.items():
        if isinstance(value, list) or value == {}:
            message.ClearField(name)
    json_format.ParseDict(dict(change), message)


# -- chunks


@case("consumer.chunk", "A flow: chunks (checklist 14)", Needs.INPUT, variants=read_vectors("chunks"))
async def chunk_vector(trial: Trial, vector: Mapping[str, Any]) -> None:
    step, stream, flow = await started(trial)
    payload = trial.inputs.chunk(0, 4)
    _change(payload, vector["change"])
    await flow.send(payload, is_streamed=False)
    reason = vector.get("reason", "")
    if "may_reject" in vector:
        await stream.until(lambda: flow.acked or flow.all("rejected"), "`ack` or `rejected`")
        reason = "" if flow.acked else vector["may_reject"]
    if not reason:
        await flow.acknowledged(1)
        await complete(step, flow)
        return
    error = await flow.rejected(Code.INVALID_ARGUMENT, reason)
    expect_equal("the metadata `edge`", trial.edge_in, error.metadata.get("edge"))
    failed = await step.failed(Code.INVALID_ARGUMENT, reason)
    expect_equal("the metadata `stage`", trial.stage.described.stage, failed.metadata.get("stage"))


def _change(payload: Payload, change: Mapping[str, Any]) -> None:
    """Changes a chunk as a vector says."""
    data = payload.data
    tensor = data.tensors[0]
    merge(change.get("tensor", {}), tensor)
    merge(change.get("data", {}), data)
    data.size_bytes += change.get("size_delta", 0)
    if "checksum" in change:
        data.checksum.algorithm = chunk_pb2.CHECKSUM_ALGORITHM_CRC32
        data.checksum.value = zlib.crc32(b"".join(payload.contents)) ^ (change["checksum"] == "wrong")
    if "other_dtype" in change:
        tensor.dtype = next(
            each for each, size in ITEM_BYTES.items() if size == ITEM_BYTES[tensor.dtype] and each != tensor.dtype
        )
    if "more_dimensions" in change:
        tensor.shape.append(1)
    if "more_rows" in change:
        require(tensor.shape, "the first tensor has no axes")
        tensor.shape[0] += 1
    if "again" in change:
        _append(payload, tensor, payload.contents[0])
    if "unaccepted" in change:
        _append(payload, tensor_pb2.Tensor(name=UNACCEPTED, dtype=tensor_pb2.DATA_TYPE_UINT8, shape=[3]), b"abc")
    if "unaccepted_dtype" in change:
        unaccepted = tensor_pb2.Tensor(name=UNACCEPTED, dtype=change["unaccepted_dtype"], shape=[3])
        _append(payload, unaccepted, bytes(3 * ITEM_BYTES[unaccepted.dtype] + change.get("more_bytes", 0)))
    for index in range(change.get("empty_tensors", 0)):
        _append(payload, tensor_pb2.Tensor(name=f"n{index}", dtype=tensor_pb2.DATA_TYPE_UINT8, shape=[0]), b"")
    for index in range(change.get("values", 0)):
        name = f"n{index}".ljust(change.get("name_chars", 0), "x")
        data.metadata[name].text = "t" * change.get("text_chars", 1)


def _append(payload: Payload, tensor: tensor_pb2.Tensor, content: bytes) -> None:
    payload.data.tensors.append(tensor)
    payload.contents.append(content)
    payload.data.size_bytes += len(content)


# -- text

_BYTES = tensor_pb2.DATA_TYPE_UINT8


@case("steps.text", "A step: the table of kinds, TEXT (checklist 9)", Needs.INPUT, variants=read_vectors("text"))
async def text_vector(trial: Trial, vector: Mapping[str, Any]) -> None:
    """Checks the text of a stage that passes text on, but for the case of its letters."""
    tensors, emits = trial.inputs.tensors, trial.stage.emits
    is_text = [each.kind for each in emits] == [signature_pb2.TENSOR_KIND_TEXT]
    require(is_text and [each.dtype for each in tensors] == [_BYTES], "the stage does not turn one text into another")
    sent = b"".join(bytes.fromhex(each) for each in vector["emitted"])
    step = await trial.call(trial.request()).accepted()
    flow, at = await (await trial.stream()).open(trial.key_in()), 0
    for each in map(bytes.fromhex, vector["emitted"]):
        tensor = tensor_pb2.Tensor(name=tensors[0].name, dtype=_BYTES, shape=[len(each)], first_row=at)
        data = chunk_pb2.ChunkData(tensors=[tensor], size_bytes=len(each))
        await flow.send(Payload(data, [each]))
        at += len(each)
    await flow.end()
    await step.finished()
    parts = step.outputs().get(emits[0].spec.name, [])
    found = "".join(part.text for part in parts)
    starts = [len("".join(part.text for part in parts[:index]).encode()) for index in range(len(parts))]
    expect_equal("the positions in bytes", starts, [part.position for part in parts])
    expect("\N{REPLACEMENT CHARACTER}" in found or _is_utf8(sent), "replaced invalid bytes", found)
    wanted = "".join(part["text"] for part in (*vector["parts"], vector["last"]) if part)
    if len(found.encode()) == len(wanted.encode()) or not _is_utf8(sent):
        expect_equal("the text, but for its case", wanted.lower(), found.lower())


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


# -- chunk policies


_MOST_ROWS = 10_000
"""The most rows of an output that is cut into chunks of a few rows."""


@case("producer.policy", "A step: chunk policy (checklist 20)", Needs.OUTPUT, variants=read_vectors("chunk_policies"))
async def policy_vector(trial: Trial, vector: Mapping[str, Any]) -> None:
    """Checks the sizes of the chunks. Which rows an engine emits together is known of none."""
    name = trial.stage.cut_tensor
    require(name and vector["policy"], "the stage emits nothing that has rows, or nothing is known of its emissions")
    reference = trial.stage.reference
    require(reference is None or reference.chunks * FRAMES <= _MOST_ROWS, "the stage emits many rows, as of audio")
    consumer = await trial.consumer()
    request = trial.request(consumer)
    binding = request.outputs[0]
    binding.ClearField("policy")
    chosen = vector["policy"]
    if "whole" in chosen:
        binding.policy.whole.SetInParent()
    else:
        binding.policy.frames.frames = chosen["frames"]["frames"]
        binding.policy.frames.ramp.extend(chosen["frames"].get("ramp", ()))
        binding.policy.frames.left_context_frames = chosen["frames"].get("left_context_frames", 0)
    step = await trial.call(request).accepted()
    await trial.supply()
    await step.finished()
    consumer.check()
    found = [_rows(each.data) for each in consumer.only().chunks]
    total = sum(rows - context for _, rows, context in found)
    expect_equal("first row, rows and context of the chunks", _cut(chosen, total), found)
    has_context = "left_context_frames" in chosen.get("frames", {})
    stated = {each.data.HasField("context_frames") for each in consumer.only().chunks}
    expect(stated <= {has_context}, f"context_frames {'set' if has_context else 'absent'}", stated)


def _rows(data: chunk_pb2.ChunkData) -> tuple[int, int, int]:
    return data.tensors[0].first_row, data.tensors[0].shape[0], data.context_frames


def _cut(policy: Mapping[str, Any], total: int) -> list[tuple[int, int, int]]:
    """Returns first row, rows and context of the chunks of a flow with this number of rows."""
    if "whole" in policy:
        return [(0, total, 0)] if total else []
    frames, cut, at = policy["frames"], list[tuple[int, int, int]](), 0
    sizes = list(frames.get("ramp", ()))
    while at < total:
        size = min(sizes.pop(0) if sizes else frames["frames"], total - at)
        context = min(frames.get("left_context_frames", 0), at)
        cut.append((at - context, size + context, context))
        at += size
    return cut


# -- rows after rebinding


_ROWS = "Rebinding and attempts: drop the rows that you have (checklist 15)"


@case("consumer.rows", _ROWS, Needs.INPUT, level=RECOVERY, variants=read_vectors("rows"))
async def rows_vector(trial: Trial, vector: Mapping[str, Any]) -> None:
    """Rebinds the incoming edge to another producer. The stage's result must be the result of all rows once."""
    require(len(trial.inputs.tensors) == 1 and trial.inputs.row_bytes, "needs one accepted tensor with rows")
    chunks = [*vector["received"], *vector["again"]]
    require(all(list(each["tensors"]) == ["x"] for each in chunks), "the vector has two tensors")
    step, consumer = await trial.start()
    flow = await (await trial.stream()).open(trial.key_in())
    await _send(trial, flow, vector["received"])
    await flow.acknowledged(len(vector["received"]))
    binding = stage_pb2.InputBinding(edge=trial.edge_in, producer=trial.peer_name("producer"), attempt=2)
    rebind = stage_pb2.RebindStepRequest(request_id=step.request.request_id, step_id=step.request.step_id)
    rebind.inputs.add(binding=binding)
    await answer_of(trial.stub.RebindStep(rebind, timeout=5))
    await flow.rejected(Code.FAILED_PRECONDITION, "STALE_ATTEMPT")
    again = await (await trial.stream(incarnation="second")).open(trial.key_in(2))
    await _send(trial, again, vector["again"])
    if (reason := vector.get("error")) == "ATTEMPTS_DIFFER":
        await again.end()
        await step.failed(Code.INVALID_ARGUMENT, reason)
    elif reason:
        await again.rejected(Code.INVALID_ARGUMENT, reason)
        await step.failed(Code.INVALID_ARGUMENT, reason)
    else:
        await again.end()
        await step.finished()
        await again.committed()
        kept = [*vector["received"], *vector["kept"]]
        whole = await _unbroken(trial, kept)
        expect_contents("the result of the kept rows", whole.contents, trial.result(step, consumer).contents)


async def _unbroken(trial: Trial, chunks: Sequence[Mapping[str, Any]]) -> Good:
    """Runs a request whose only producer sends these chunks. Returns its result."""
    request_id = f"{trial.request_id}.unbroken"
    step, consumer = await trial.start(request_id=request_id)
    flow = await (await trial.stream(incarnation="second")).open(trial.key_in(request_id=request_id))
    await _send(trial, flow, chunks)
    await flow.end()
    await step.finished()
    return trial.result(step, consumer)


async def _send(trial: Trial, flow: Flow, chunks: Sequence[Mapping[str, Any]]) -> None:
    for each in chunks:
        first_row, rows = each["tensors"]["x"]
        payload = trial.inputs.chunk(0, rows, first_row=first_row)
        for name in ("context_frames", "token_start"):
            if name in each:
                setattr(payload.data, name, each[name])
        await flow.send(payload)


# -- replies to a producer


@case(
    "producer.reply",
    "The producer: what a reply does (checklist 17, 18, 23)",
    Needs.OUTPUT,
    variants=read_vectors("producer"),
)
async def reply_vector(trial: Trial, vector: Mapping[str, Any]) -> None:
    """Adds a reply after the first data chunk, for which alone there is credit until then."""
    trial.require_chunks()
    if vector["outcome"] == "waits":
        await trial.require_rebinding()
    added = list[stage_pb2.PutReply]()

    def answer(consumer: Consumer, item: stage_pb2.PutItem) -> Sequence[stage_pb2.PutReply]:
        replies = list(consumer.take(item))
        flow = next((each for each in consumer.flows.values() if each.chunks), None)
        if flow is not None and not added:
            added.append(_reply(vector, flow.key))
            replies += added
        return replies

    step, consumer = await sending(trial, answer=answer, raises=False, limit_bytes=1 << 30, limit_chunks=1)
    await consumer.until(lambda: added, "a chunk")
    if vector["outcome"] == "finished":
        await consumer.raise_limits(limit_bytes=1 << 40, chunks=1 << 30)
        await delivered(trial, step, consumer)
        openings = len(consumer.only().openings)
        expect(openings >= vector.get("openings", 1), f"{vector.get('openings')} openings", openings)
    elif vector["outcome"] == "failed":
        failed = await step.failed(Code[vector["code"]], vector["reason"])
        if "stage" in vector:
            wanted = "the metadata `stage`, in which the error occurred first"
            expect_equal(wanted, vector["stage"], failed.metadata.get("stage"))
    else:
        await asyncio.sleep(1.0)
        expect(not step.is_over, "a step that waits for RebindStep", step.came)


def _reply(vector: Mapping[str, Any], key: chunk_pb2.EdgeKey) -> stage_pb2.PutReply:
    reply = stage_pb2.PutReply()
    merge(vector["reply"], reply)
    kind = reply.WhichOneof("reply")
    named = getattr(reply, kind).key if kind else reply.key
    if not reply.ignorable and "no_key" not in vector:
        named.CopyFrom(key)
    if "other_flow" in vector:
        named.request_id = "conformance.none"
    if "unknown_field" in vector:
        reply.MergeFromString(UNKNOWN_FIELD)
    return reply
