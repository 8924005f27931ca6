"""The test vectors that are exchanges of a producer's items and the stage's replies (protos/vectors)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stagemesh.common.errors import Code, StagemeshError
from stagemesh.rpc.error_mapping import error_from_wire
from stagemesh.stage_conformance.cases import Needs, case, expect
from stagemesh.stage_conformance.content import UNACCEPTED, Inputs, digest_of, read_vectors
from stagemesh.stage_conformance.played_producer import Flow
from stagemesh.stage_conformance.trial import Trial, require
from stagemesh.v1 import chunk_pb2, stage_pb2, tensor_pb2

_UNSAFE = "the accepted tensors have no rows, or several of them have"
_WRONG_DIGEST = bytes(32)


class VectorFlow:
    """Plays the exchanges of a vector on a flow: sends the items, and compares the replies."""

    def __init__(self, flow: Flow, inputs: Inputs) -> None:
        self._flow, self._inputs = flow, inputs
        self._seen = 0

    async def play(self, exchanges: Sequence[Mapping[str, Any]]) -> None:
        """Plays all exchanges. Raises MismatchError if other replies arrive."""
        for number, exchange in enumerate(exchanges):
            for item in exchange["items"]:
                for each in self._items(item):
                    await self._flow.stream.put(each)
            await self._compare(number, exchange["replies"])

    def _items(self, item: Mapping[str, Any]) -> list[stage_pb2.PutItem]:
        key, kind, flow = self._flow.key, item["kind"], self._flow
        match kind:
            case "open":
                connector = item.get("connector", chunk_pb2.CONNECTOR_GRPC)
                return [
                    stage_pb2.PutItem(open=stage_pb2.OpenEdge(key=key, connector=connector, opening=item["opening"]))
                ]
            case "fragment":
                return [self._fragment(item)]
            case "demand":
                return [stage_pb2.PutItem(demand=stage_pb2.CreditDemand(key=key, size_bytes=item["size_bytes"]))]
            case "chunk":
                return [self._chunk(item)]
            case "end":
                data = [flow.sent[seq] for seq in sorted(flow.sent) if seq < item["seq"]]
                digest = {"wrong": _WRONG_DIGEST, "": b""}.get(item.get("digest", "right"))
                end = chunk_pb2.ChunkEnd(count=item["count"], digest=digest_of(data) if digest is None else digest)
                return [stage_pb2.PutItem(chunk=chunk_pb2.Chunk(key=key, seq=item["seq"], end=end))]
            case "abort":
                error = chunk_pb2.Error(code=Code[item["code"]], reason=item["reason"], message="a test vector")
                abort = chunk_pb2.ChunkAbort(error=error)
                return [stage_pb2.PutItem(chunk=chunk_pb2.Chunk(key=key, seq=item["seq"], abort=abort))]
            case _:
                raise AssertionError(f"unknown item {kind!r} in a test vector")

    def _fragment(self, item: Mapping[str, Any]) -> stage_pb2.PutItem:
        if "payload_bytes" in item:
            total, offset, payload = item["total_bytes"], item["offset"], bytes(item["payload_bytes"])
        else:
            unit = self._inputs.row_bytes
            whole = b"".join(self._inputs.chunk(0, item["total_rows"], first_row=item["first_row"]).contents)
            total, offset = item["total_rows"] * unit, item["offset_row"] * unit
            payload = whole[offset:][: item["rows"] * unit].ljust(item["rows"] * unit, b"\0")
        fragment = chunk_pb2.ChunkFragment(
            key=self._flow.key, seq=item["seq"], total_bytes=total, offset=offset, payload=payload
        )
        return stage_pb2.PutItem(fragment=fragment)

    def _chunk(self, item: Mapping[str, Any]) -> stage_pb2.PutItem:
        payload = self._inputs.chunk(0, item["rows"], first_row=item["first_row"])
        data = payload.streamed() if item.get("is_streamed") else payload.inline()
        unit = self._inputs.row_bytes
        if "region" in item:
            require(len(data.tensors) == 1, _UNSAFE)
            _locate(data.tensors[0], item["region"], unit)
        if "other_rows" in item:
            size = item["other_rows"] * unit
            other = data.tensors.add(name=UNACCEPTED, dtype=tensor_pb2.DATA_TYPE_UINT8, shape=[size])
            data.size_bytes += size
            if "other_region" in item:
                _locate(other, item["other_region"], unit)
            else:
                other.inline = bytes(size)
        self._flow.sent[item["seq"]] = data
        return stage_pb2.PutItem(chunk=chunk_pb2.Chunk(key=self._flow.key, seq=item["seq"], data=data))

    async def _compare(self, number: int, wanted: Sequence[Mapping[str, Any]]) -> None:
        """Waits for the replies to an exchange. Acknowledgements may be combined, and grants of credit do not count."""
        events = [each for each in wanted if each["kind"] != "ack"]
        acked = max((each["next_seq"] for each in wanted if each["kind"] == "ack"), default=0)
        stream, what = self._flow.stream, f"after exchange {number}: {json.dumps(list(wanted))}"
        await stream.until(
            lambda: (len(self._events()) >= len(events) and self._flow.acked >= acked) or stream.ended, what
        )
        found = self._events()[: len(events)] if events else self._events()
        expect(len(found) == len(events) and self._flow.acked >= acked, what, stream.came)
        for want, reply in zip(events, found, strict=True):
            check_reply(want, reply, what)
        self._seen += len(events)

    def _events(self) -> list[stage_pb2.PutReply]:
        """Returns the replies that were not compared yet, without acknowledgements and credit."""
        others = [each for each in self._flow.replies if each.WhichOneof("reply") not in {"ack", "credit"}]
        return others[self._seen :]


def _locate(tensor: tensor_pb2.Tensor, region: Sequence[int], unit: int) -> None:
    tensor.streamed.offset, tensor.streamed.size_bytes = (each * unit for each in region)


def check_reply(want: Mapping[str, Any], reply: stage_pb2.PutReply, what: str) -> None:
    """Raises MismatchError if a reply differs from what a vector has."""
    kind = str(reply.WhichOneof("reply"))
    found: dict[str, Any] = {"kind": kind}
    if kind == "opened":
        found |= {"next_seq": reply.opened.next_seq, "opening": reply.opened.opening}
    elif kind in {"resync", "rejected"}:
        error: StagemeshError = error_from_wire(getattr(reply, kind).error)
        found |= {"code": error.code.name, "reason": error.reason}
    allowed: dict[str, list[Any]] = {
        name: value if isinstance(value, list) else [value] for name, value in want.items()
    }
    expect(all(found.get(name) in values for name, values in allowed.items()), what, found)


async def _play(trial: Trial, vector: Mapping[str, Any]) -> None:
    inputs = trial.inputs
    require(all(each.has_rows for each in inputs.tensors), _UNSAFE)
    step, consumer = await trial.start()
    stream = await trial.stream()
    flow = stream.flow(trial.key_in())
    await VectorFlow(flow, inputs).play(vector["exchanges"])
    if flow.all("commit"):
        await step.finished()
        if consumer is not None:
            consumer.check()
    elif flow.all("rejected") and flow.all("opened"):
        await step.failed()


@case(
    "consumer",
    "The consumer: the table of items (checklist 11, 13, 14)",
    Needs.INPUT,
    variants=read_vectors("consumer"),
)
async def consumer_vector(trial: Trial, vector: Mapping[str, Any]) -> None:
    await _play(trial, vector)


@case("consumer.fragments", "Fragments (checklist 14)", Needs.INPUT, variants=read_vectors("fragments"))
async def fragment_vector(trial: Trial, vector: Mapping[str, Any]) -> None:
    await _play(trial, vector)
