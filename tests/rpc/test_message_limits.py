"""Messages of many elements: none of them is parsed, and callers whose messages are rejected again and again wait."""

import math
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from stagemesh.common.errors import InvalidRequestError, StagemeshError, UnauthenticatedError
from stagemesh.common.process.config import TokenConfig
from stagemesh.common.wire.encoding import MAX_TOKENS, parse_message, varint
from stagemesh.rpc.authentication import TokenChecker, TokenEntry, add_token
from stagemesh.rpc.call_limits import Messages
from stagemesh.rpc.channels import CHANNEL_OPTIONS, MAX_FIELDS, MAX_MESSAGE_BYTES, open_channel
from stagemesh.rpc.error_mapping import error_from_wire, error_to_wire, to_status
from stagemesh.rpc.handlers import answered, streaming
from stagemesh.rpc.message_streams import ClientStream
from stagemesh.rpc.server import Server
from stagemesh.v1 import (
    admin_pb2,
    chunk_pb2,
    control_pb2,
    jobs_pb2,
    media_pb2,
    membership_pb2,
    orchestrator_pb2,
    orchestrator_pb2_grpc,
    request_pb2,
    stage_pb2,
    tensor_pb2,
)
from stagemesh.v1.orchestrator_pb2 import GenerateRequest
from tests.credentials import issue, process_credentials
from tests.rpc.call_errors import error_of, raises

SERVICES = (admin_pb2, control_pb2, jobs_pb2, media_pb2, membership_pb2, orchestrator_pb2, stage_pb2)
GENERATE = "/stagemesh.v1.OrchestratorService/Generate"
TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
TOKENS = ("ids", "token_ids")
LIMIT = 64
LOOP_S = 0.25
"""The processor time that a rejected message may take from the event loop. Five times the goal, for busy machines."""


def requests_of(services: Sequence[ModuleType]) -> Sequence[Descriptor]:
    """Returns the type of the request of every RPC."""
    found = [service for module in services for service in module.DESCRIPTOR.services_by_name.values()]
    return [method.input_type for service in found for method in service.methods]


def paths_of(message: Descriptor) -> Iterator[list[FieldDescriptor]]:
    """Yields the path to every field of a message, at any depth."""
    for field in message.fields:
        yield [field]
        if field.message_type is not None:
            yield from ([field, *rest] for rest in paths_of(field.message_type))


def within(path: Sequence[FieldDescriptor], content: bytes) -> bytes:
    """Returns a message with `content` in the message at the end of a path."""
    for field in reversed(path):
        content = varint(field.number << 3 | 2) + varint(len(content)) + content
    return content


def dense(path: Sequence[FieldDescriptor], count: int) -> Iterator[bytes]:
    """Yields messages of which the field at the end of a path has this number of values, in each encoding."""
    *outer, field = path
    if field.message_type is not None or field.type in TEXTS:
        yield within(outer, (varint(field.number << 3 | 2) + b"\0") * count)
        return
    fixed = {FieldDescriptor.TYPE_DOUBLE: (1, 8), FieldDescriptor.TYPE_FLOAT: (5, 4)}
    kind, size_bytes = fixed.get(field.type, (0, 1))
    yield within(outer, (varint(field.number << 3 | kind) + bytes(size_bytes)) * count)
    if field.is_repeated and field.name not in TOKENS:
        assert kind == 0, "packed values of fixed size are not counted exactly"
        yield within(path, bytes(count))


class NeverParsed:
    """A type of messages that must not be parsed."""

    def __init__(self, descriptor: Descriptor) -> None:
        self.DESCRIPTOR = descriptor

    def FromString(self, data: bytes) -> None:
        raise AssertionError(f"{len(data)} bytes were parsed")


@pytest.mark.parametrize("request_type", requests_of(SERVICES), ids=lambda each: each.name)
def test_no_field_at_any_depth_may_have_many_values(request_type: Descriptor) -> None:
    never: Any = NeverParsed(request_type)
    unknown = varint(1000 << 3 | 2) + b"\0"
    for path in paths_of(request_type):
        name = ".".join(field.name for field in path)
        for data in dense(path, LIMIT + 1):
            with raises(
                InvalidRequestError, reason="MESSAGE_TOO_LARGE", match="more than 64 values.*send fewer"
            ) as caught:
                parse_message(never, data, max_fields=LIMIT)
            assert caught.value.metadata == {"field": name}
            assert len(caught.value.message) < 300
        if path[-1].message_type is not None:
            with raises(InvalidRequestError, reason="MESSAGE_TOO_LARGE"):
                parse_message(never, within(path, unknown * LIMIT), max_fields=LIMIT)


@pytest.mark.parametrize("request_type", requests_of(SERVICES), ids=lambda each: each.name)
def test_as_many_values_as_the_limit_are_parsed(request_type: Descriptor) -> None:
    for path in paths_of(request_type):
        for data in dense(path, LIMIT - len(path)):
            message: Any = GetMessageClass(request_type)
            assert parse_message(message, data, max_fields=LIMIT) == message.FromString(data)


def test_long_lists_of_tokens_texts_and_tensors_are_large_but_few_values() -> None:
    tokens = request_pb2.TokenIds(ids=[200_000] * MAX_TOKENS)
    samples = request_pb2.Input(tensors=[tensor_pb2.Tensor(name="x", inline=bytes(4 << 20))], text="é" * (1 << 20))
    for given in (request_pb2.Input(token_ids=tokens), samples):
        data = GenerateRequest(input=given).SerializeToString()
        assert parse_message(GenerateRequest, data, max_fields=MAX_FIELDS).input == given
    tokens.ids.append(1)
    with raises(InvalidRequestError, reason="MESSAGE_TOO_LARGE", match="524,288 token ids"):
        parse_message(request_pb2.TokenIds, tokens.SerializeToString(), max_fields=MAX_FIELDS)


@pytest.mark.parametrize("end", [b"\x0a\x05a", b"\x0a", b"\x0b", b"\xff" * 11, b"\x1a\x7f\x0a\x01a", b"\x09\0"])
def test_a_damaged_message_is_malformed_even_if_it_is_large(end: bytes) -> None:
    for data in (end, within([GenerateRequest.DESCRIPTOR.fields_by_name["pipeline"]], bytes(MAX_FIELDS)) + end):
        with raises(InvalidRequestError, reason="MALFORMED_MESSAGE"):
            parse_message(GenerateRequest, data, max_fields=MAX_FIELDS)


def test_a_string_that_is_not_utf8_makes_a_message_malformed() -> None:
    for path in paths_of(GenerateRequest.DESCRIPTOR):
        if path[-1].type == FieldDescriptor.TYPE_STRING:
            with raises(InvalidRequestError, reason="MALFORMED_MESSAGE", match="GenerateRequest: .* is not UTF-8"):
                parse_message(GenerateRequest, within(path, b"\xc3("), max_fields=MAX_FIELDS)


@answered
class Rejecting(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Rejects each request whose id is not "good", as an orchestrator does."""

    parsed: ClassVar[list[str]] = []

    @streaming
    async def Generate(self, request: GenerateRequest, _context: object) -> Any:
        self.parsed.append(request.request_id)
        if request.request_id != "good":
            raise InvalidRequestError(f"the request {request.request_id!r} is bad")
        yield orchestrator_pb2.GenerateResponse()

    @streaming
    async def Converse(self, requests: Messages, _context: object) -> Any:  # type: ignore[override]
        async for event in requests:
            requests.reject()
            yield orchestrator_pb2.ConverseResponse(turn=event.seq)


@asynccontextmanager
async def served(tokens: TokenChecker | None = None) -> AsyncGenerator[str]:
    """Serves `Rejecting` on a free port. Yields its endpoint."""
    Rejecting.parsed.clear()
    server = Server("127.0.0.1:0", tokens=tokens)
    orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(Rejecting(), server.grpc)  # type: ignore[abstract]
    async with server.serving(grace_s=0) as port:
        yield f"localhost:{port}"


def call(channel: grpc.aio.Channel, data: bytes) -> Any:
    """Calls Generate with a serialized request."""
    method: Any = channel.unary_stream(GENERATE)
    return method(data, timeout=20)


def many(name: str, *, size_bytes: int = MAX_MESSAGE_BYTES - 64) -> bytes:
    """Returns a request with as many empty elements of a list as fit into this number of bytes."""
    path = next(path for path in paths_of(GenerateRequest.DESCRIPTOR) if ".".join(each.name for each in path) == name)
    return next(dense(path, size_bytes // 2))


@pytest.mark.parametrize("field", ["outputs", "next_positions", "input.conversation.messages", "parameters.options"])
async def test_a_message_of_four_million_elements_does_not_stop_the_loop(field: str) -> None:
    data = many(field)
    async with served() as endpoint, open_channel(endpoint) as channel:
        assert [each async for each in call(channel, GenerateRequest(request_id="good").SerializeToString())]
        began_s = time.thread_time()
        error = await error_of(call(channel, data))
        assert time.thread_time() - began_s < LOOP_S
    assert (error.reason, error.metadata["field"]) == ("MESSAGE_TOO_LARGE", field)
    assert Rejecting.parsed == ["good"]


async def test_a_message_is_not_parsed_before_its_caller_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = list[int]()
    monkeypatch.setattr("stagemesh.rpc.call_limits.parse_message", lambda *_, **__: parsed.append(1))
    with process_credentials(issue(tmp_path, "orchestrator/main")):
        add_token(tmp_path / "tokens", "secret", TokenEntry("alice"))
        async with served(TokenChecker(TokenConfig(file=str(tmp_path / "tokens")))) as endpoint:
            with process_credentials(issue(tmp_path, "client/unused")):
                channel = open_channel(endpoint)
            async with channel:
                error = await error_of(call(channel, many("outputs")))
    assert (type(error), error.reason, parsed) == (UnauthenticatedError, "NO_TOKEN", [])


ANY_SIZE = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
TOO_LARGE = within([GenerateRequest.DESCRIPTOR.fields_by_name["pipeline"]], b"x" * (MAX_MESSAGE_BYTES + 1))


# gRPC does not report to the sender of a stream why a write has failed. Our senders check the sizes before.
@pytest.mark.parametrize(("method", "sent"), [("Generate", True), ("Generate", False), ("Converse", False)])
async def test_a_message_above_the_limit_is_not_an_overload(method: str, sent: bool) -> None:
    async with served() as endpoint:
        channel = open_channel(endpoint) if sent else grpc.aio.insecure_channel(endpoint, options=ANY_SIZE)
        async with channel:
            make: Any = channel.stream_stream if method == "Converse" else channel.unary_stream
            request = iter([TOO_LARGE]) if method == "Converse" else TOO_LARGE
            error = await error_of(make(f"/stagemesh.v1.OrchestratorService/{method}")(request, timeout=20))
    assert (error.reason, error.code.name, error.retry_after_s) == ("MESSAGE_TOO_LARGE", "INVALID_ARGUMENT", None)
    assert "8388608" in error.message
    assert "shorten the input" in error.message


@pytest.mark.parametrize("sent", [True, False], ids=["by the sender", "by the receiver"])
async def test_an_answer_above_the_limit_is_not_an_overload(sent: bool) -> None:
    async def answer(_requests: object, _context: object) -> AsyncGenerator[bytes]:
        yield bytes(MAX_MESSAGE_BYTES + 1)

    make: Any = grpc.stream_stream_rpc_method_handler
    handlers = grpc.method_handlers_generic_handler("stagemesh.v1.OrchestratorService", {"Generate": make(answer)})
    server = grpc.aio.server(handlers=[handlers], options=CHANNEL_OPTIONS if sent else ANY_SIZE)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        error = await error_of(call(channel, b""))
        stream = ClientStream(channel, Ended(), peer="the stage", method=GENERATE)
        await stream.run()
    await server.stop(None)
    (ended,) = Ended.errors
    Ended.errors.clear()
    for each in (error, ended):
        assert isinstance(each, InvalidRequestError)
        assert each.reason == "MESSAGE_TOO_LARGE"
        assert "8388608" in each.message


class Ended:
    """Records the errors with which streams end."""

    errors: ClassVar[list[StagemeshError | None]] = []

    def received(self, data: bytes) -> None:
        """Ignores the message."""

    def writable(self) -> None:
        """Sends nothing."""

    def closed(self, error: StagemeshError | None) -> None:
        self.errors.append(error)


async def test_a_caller_whose_large_messages_are_rejected_waits_and_others_do_not() -> None:
    async with served() as endpoint, open_channel(endpoint) as channel, open_channel(endpoint) as other:
        small = GenerateRequest(request_id="bad").SerializeToString()
        reasons = {(await error_of(call(channel, small))).reason for _ in range(200)}
        assert reasons == {"INVALID_REQUEST"}
        for _ in range(20):
            error = await error_of(call(channel, many("outputs")))
            if error.reason != "MESSAGE_TOO_LARGE":
                break
        last = await error_of(call(channel, small))
        assert (last.reason, last.code.name) == ("CALL_LIMIT", "RESOURCE_EXHAUSTED")
        assert 0 < (last.retry_after_s or 0) < 10
        assert [each async for each in call(other, GenerateRequest(request_id="good").SerializeToString())]


async def test_rejected_messages_of_open_services_count_for_the_certificate(tmp_path: Path) -> None:
    with process_credentials(issue(tmp_path, "orchestrator/main")):
        async with served() as endpoint:
            reasons = list[str]()
            for name in ["client/alice"] * 20 + ["client/bob"]:
                with process_credentials(issue(tmp_path, name)):
                    channel = open_channel(endpoint)
                async with channel:
                    check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
                    reasons.append((await error_of(check(b"\xff" * (4 << 20), timeout=20))).reason)
    assert (reasons[0], reasons[-2], reasons[-1]) == ("MALFORMED_MESSAGE", "CALL_LIMIT", "MALFORMED_MESSAGE")


async def test_rejected_events_of_a_stream_count_too() -> None:
    opening = orchestrator_pb2.SessionOpen(outputs=[""] * (MAX_FIELDS - 8))
    event = orchestrator_pb2.ConverseRequest(seq=1, open=opening).SerializeToString()
    async with served() as endpoint, open_channel(endpoint) as channel:
        method: Any = channel.stream_stream("/stagemesh.v1.OrchestratorService/Converse")
        conversation = method(timeout=20)
        answers = 0
        with suppress(grpc.aio.AioRpcError):
            while await conversation.write(event) is None and await conversation.read() is not grpc.aio.EOF:
                answers += 1
        assert 0 < answers < 10
        # A client that sends when its call ends does not receive the status, but its next call does.
        assert (await error_of(call(channel, b""))).reason == "CALL_LIMIT"


async def test_an_error_never_contains_a_long_input() -> None:
    async with served() as endpoint, open_channel(endpoint) as channel:
        error = await error_of(call(channel, GenerateRequest(request_id="\x00" * (4 << 20)).SerializeToString()))
    assert error.reason == "INVALID_REQUEST"
    assert len(error.message.encode()) <= 1024
    assert len(error.metadata["request_id"]) <= 256
    wire = error_to_wire(InvalidRequestError("é" * 5000, metadata={"option": "x" * 5000}))
    assert len(wire.message.encode()) <= 4096
    assert len(wire.metadata["option"].encode()) == 255


@pytest.mark.parametrize("retry_after_s", [math.inf, -math.inf, math.nan, 1e300, -1.0])
def test_an_error_of_a_peer_is_limited_and_has_a_status(retry_after_s: float) -> None:
    metadata = {**{f"{number}" + "x" * 5000: "x" * 5000 for number in range(1000)}, "stage": "a"}
    wire = chunk_pb2.Error(code=14, message="x" * 5000, metadata=metadata, retry_after_s=retry_after_s)
    error = error_from_wire(wire)
    assert to_status(error).code is grpc.StatusCode.UNAVAILABLE
    assert 0 <= (error.retry_after_s or 0) <= 86_400
    assert (len(error.message), len(error.metadata), error.metadata["stage"]) == (4096, 64, "a")
    assert max(map(len, (*error.metadata, *error.metadata.values()))) == 256
