"""How a stage joins: health, Describe, protocol versions, pings and sizes of messages."""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stagemesh.common.errors import Code
from stagemesh.common.wire.encoding import varint
from stagemesh.stage_conformance.cases import (
    FURTHER,
    NotServedError,
    answer_of,
    brief,
    case,
    error_of,
    expect,
    expect_equal,
    expect_failure,
)
from stagemesh.stage_conformance.content import ITEM_BYTES
from stagemesh.stage_conformance.trial import Trial
from stagemesh.v1 import chunk_pb2, signature_pb2, stage_pb2, stage_pb2_grpc
from stagemesh.v1.protocol_pb2 import Protocol

_PROFILE = "The minimum profile"
_CONNECTIONS = "Connections and messages"
_VERSIONS = "Versions and unknown kinds"
_UNKNOWN_FIELD = 2047
"""The number of a field that no message has."""


async def _describe(trial: Trial, **fields: Any) -> stage_pb2.DescribeResponse:
    return await answer_of(trial.stub.Describe(stage_pb2.DescribeRequest(**fields), timeout=2))


@case("joining.health", f'{_PROFILE}: Health/Watch of the service "" (checklist 1)')
async def health(trial: Trial) -> None:
    stub: Any = health_pb2_grpc.HealthStub(trial.stage.channel)
    call = stub.Watch(health_pb2.HealthCheckRequest(), timeout=5)
    answer = await call.read()
    expect(answer is not grpc.aio.EOF, "a health status", "the end of the call")
    expect_equal("the status", health_pb2.HealthCheckResponse.SERVING, answer.status)
    await asyncio.sleep(0.2)
    expect(not call.done(), "the call of Health/Watch goes on", "its end")
    call.cancel()


@case("joining.identity", f"{_PROFILE}: Describe must fill (checklist 1)")
async def identity(trial: Trial) -> None:
    described = await _describe(trial)
    for name in ("pipeline", "generation", "stage", "replica", "incarnation"):
        value = getattr(described, name)
        expect(0 < len(value) <= 256, f"`{name}` with 1 to 256 characters", repr(value[:300]))
    expect_equal("the state", stage_pb2.REPLICA_STATE_READY, described.state)
    expect(
        not described.replica.startswith("@input"), "a replica name that does not begin with @input", described.replica
    )


@case("joining.incarnation", f"{_PROFILE}: `incarnation` is the same until the process restarts (checklist 2)")
async def incarnation(trial: Trial) -> None:
    expect_equal("the incarnation", trial.stage.described.incarnation, (await _describe(trial)).incarnation)


@case("joining.protocol", f"{_VERSIONS}: Describe has the range of versions (checklist 1)")
async def protocol(trial: Trial) -> None:
    described = await _describe(trial, protocol=Protocol(lowest_version=1, highest_version=7, features=["x"]))
    expect(described.HasField("protocol"), "`protocol`", "none")
    low, high = described.protocol.lowest_version, described.protocol.highest_version
    expect(1 <= low <= 1 <= high, "a range with version 1, whose lowest is at least 1", f"{low} to {high}")
    if described.protocol.HasField("max_message_bytes"):
        limit = described.protocol.max_message_bytes
        expect(limit >= 1 << 21, "max_message_bytes of at least 2 MiB", limit)


@case("joining.connectors", f"{_PROFILE}: `connectors` contains grpc")
async def connectors(trial: Trial) -> None:
    found = list((await _describe(trial)).connectors)
    expect(chunk_pb2.CONNECTOR_GRPC in found, "connectors with CONNECTOR_GRPC", found)
    expect(not {0, 1} & set(found), "no UNSPECIFIED and no AUTO among the connectors", found)


@case("joining.signature", f"{_PROFILE}: `signature` (checklist 3)")
async def signature(trial: Trial) -> None:
    described = await _describe(trial)
    if not described.HasField("signature"):
        return
    found = described.signature
    for kind, specs in (
        ("accepts", [each.spec for each in found.accepts]),
        ("emits", [each.spec for each in found.emits]),
    ):
        names = [each.name for each in specs]
        expect(all(names) and len(set(names)) == len(names), f"different names in `{kind}`", names)
        known = all(each.ticket_kind or each.dtype in ITEM_BYTES for each in specs)
        expect(known, f"a known data type of each tensor in `{kind}`", brief(specs))
    for each in found.emits:
        is_audio = each.kind == signature_pb2.TENSOR_KIND_AUDIO
        expect(each.kind or each.spec.ticket_kind, "a kind of each emitted tensor", brief(each))
        expect(bool(each.sample_rate_hz) == is_audio, "sample_rate_hz of audio alone", brief(each))
        expect(
            bool(each.media_type) == (each.kind == signature_pb2.TENSOR_KIND_MEDIA),
            "media_type of MEDIA alone",
            brief(each),
        )


_WRONG = {
    "later": Protocol(lowest_version=8, highest_version=9),
    "zero": Protocol(lowest_version=0, highest_version=0),
    "reversed": Protocol(lowest_version=2, highest_version=1),
}


@case("joining.wrong-version", f"{_VERSIONS}: NO_COMMON_VERSION in Describe (checklist 5)", variants=_WRONG)
async def wrong_version(trial: Trial, wrong: Protocol) -> None:
    call = trial.stub.Describe(stage_pb2.DescribeRequest(protocol=wrong), timeout=2)
    await expect_failure(call, Code.FAILED_PRECONDITION, "NO_COMMON_VERSION")


@case("joining.unknown-field", f"{_VERSIONS}: a field of a message that is not known is ignored (checklist 22)")
async def unknown_field(trial: Trial) -> None:
    await _describe_raw(trial, _field(_UNKNOWN_FIELD, b"x"))


@case("joining.large-message", f"{_CONNECTIONS}: a message has at most 8 MiB (checklist 1)")
async def large_message(trial: Trial) -> None:
    limit = trial.stage.described.protocol.max_message_bytes or 8 << 20
    await _describe_raw(trial, _field(_UNKNOWN_FIELD, bytes(limit - 64)))


@case("joining.unknown-method", f"{_PROFILE}: a method that is not served answers UNIMPLEMENTED")
async def unknown_method(trial: Trial) -> None:
    opener: Any = trial.stage.channel.unary_unary
    call = opener("/stagemesh.v1.StageService/NoSuchMethod")
    try:
        await call(b"", timeout=5)
    except grpc.aio.AioRpcError as exc:
        expect_equal("the status", grpc.StatusCode.UNIMPLEMENTED, exc.code())
    else:
        expect(False, "UNIMPLEMENTED", "an answer")


@case("joining.pings", f"{_CONNECTIONS}: a ping every 0.5 s, also without streams (checklist 1)", waits_s=3.5)
async def pings(trial: Trial) -> None:
    async with trial.own_channel({"keepalive_s": 0.5}) as channel:
        await answer_of(stage_pb2_grpc.StageServiceStub(channel).Describe(stage_pb2.DescribeRequest(), timeout=5))
        expect_equal("the connection", grpc.ChannelConnectivity.READY, channel.get_state())
        # A server that does not tolerate pings closes the connection at the third one.
        try:
            async with asyncio.timeout(3.5):
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        except TimeoutError:
            return
        expect(False, "a connection that stays open for 3.5 s without calls", channel.get_state())


@case("joining.invalid-utf-8", f"{_CONNECTIONS}: texts are valid UTF-8 (MALFORMED_MESSAGE)")
async def invalid_utf_8(trial: Trial) -> None:
    opener: Any = trial.stage.channel.unary_stream
    for name in (b"request_id", b"step_id"):
        call = opener("/stagemesh.v1.StageService/ExecuteStep")(_field(1 if name == b"request_id" else 2, b"\xff"))
        try:
            async with asyncio.timeout(5):
                answer = await call.read()
        except grpc.aio.AioRpcError:
            continue
        expect(answer is grpc.aio.EOF and await call.code() is not grpc.StatusCode.OK, "an error", answer)


@case("joining.watch-load", "Other calls: WatchLoad sends a report at once and after each interval", level=FURTHER)
async def watch_load(trial: Trial) -> None:
    call: Any = trial.stub.WatchLoad(stage_pb2.WatchLoadRequest(interval_s=0.1), timeout=5)
    try:
        reports = [await call.read() for _ in range(3)]
    except grpc.aio.AioRpcError as exc:
        raise NotServedError from error_of(exc)
    expect(grpc.aio.EOF not in reports, "three reports in 5 s", "the end of the call")
    call.cancel()
    low: Any = trial.stub.WatchLoad(stage_pb2.WatchLoadRequest(interval_s=0.001), timeout=5)
    await expect_failure(low.read(), Code.INVALID_ARGUMENT)


@case("joining.get-chunk", "Other calls: GetChunk of a flow that is not retained", level=FURTHER)
async def get_chunk(trial: Trial) -> None:
    key = chunk_pb2.EdgeKey(request_id=trial.request_id, edge="x->y", attempt=1)
    call: Any = trial.stub.GetChunk(stage_pb2.GetChunkRequest(key=key), timeout=5)
    await expect_failure(call.read(), None)


def _field(number: int, content: bytes) -> bytes:
    """Returns a serialized field of the type bytes."""
    return varint(number << 3 | 2) + varint(len(content)) + content


async def _describe_raw(trial: Trial, request: bytes) -> None:
    """Calls Describe with these bytes, and checks the answer."""
    opener: Any = trial.stage.channel.unary_unary
    call = opener("/stagemesh.v1.StageService/Describe", response_deserializer=stage_pb2.DescribeResponse.FromString)
    described: stage_pb2.DescribeResponse = await answer_of(call(request, timeout=5))
    expect_equal("the replica", trial.stage.described.replica, described.replica)
