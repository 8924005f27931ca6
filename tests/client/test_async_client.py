import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagemesh.client import (
    Admitted,
    AsyncClient,
    AudioChunk,
    AudioFile,
    AudioSamples,
    Content,
    Conversation,
    Finished,
    ImageFile,
    Medium,
    Message,
    Progress,
    Queued,
    Result,
    RetryPolicy,
    Text,
    TokenLogprob,
    TokenLogprobs,
    Tool,
    ToolCall,
    VideoFile,
    read_media,
)
from stagemesh.common import errors
from stagemesh.common.wire.tensors import read_inline
from stagemesh.conformance.replicas import until
from stagemesh.rpc.server import Server
from stagemesh.v1 import request_pb2, stage_pb2
from stagemesh.v1.orchestrator_pb2 import GenerateRequest, GenerateResponse
from stagemesh.v1.orchestrator_pb2_grpc import add_OrchestratorServiceServicer_to_server
from stagemesh.v1.request_pb2 import ROLE_ASSISTANT, ROLE_SYSTEM, ROLE_TOOL, ROLE_USER, Output, TokenIds
from tests.client.conftest import Generate
from tests.client.scripted import Pause, Script, ScriptedOrchestrator, admitted, audio, finished, progress, queued, text
from tests.rpc.call_errors import raises


@pytest.fixture
async def client(orchestrator: ScriptedOrchestrator) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(orchestrator.endpoint) as made:
        yield made


async def _result(orchestrator: ScriptedOrchestrator, *parts: GenerateResponse) -> Result:
    """Returns the result of a request whose script has these parts between its first and last events."""
    orchestrator.scripts.append([admitted(), *parts, finished()])
    async with AsyncClient(orchestrator.endpoint) as client:
        return await client.generate("hello").result()


async def _sent(orchestrator: ScriptedOrchestrator, *prompt: Content, **arguments: Any) -> GenerateRequest:
    """Sends a request with these arguments, and returns what the server receives."""
    orchestrator.scripts.append([admitted(), finished()])
    async with AsyncClient(orchestrator.endpoint) as client:
        await client.generate(*prompt, **arguments).result()
    return orchestrator.requests[-1]


async def test_events_arrive_typed_and_in_order(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    orchestrator.scripts.append([admitted(), progress("thinker", steps=1), text("Hi"), audio([0.5]), finished()])
    events = [event async for event in client.generate("hello")]
    assert [type(event) for event in events] == [Admitted, Progress, Text, AudioChunk, Finished]
    assert events[2] == Text(output="text", delta="Hi")


async def test_result_joins_text_and_audio(orchestrator: ScriptedOrchestrator) -> None:
    result = await _result(orchestrator, text("Hi "), audio([0.5]), text("you"), audio([-0.5, 1]))
    assert (result.text, result.sample_rate_hz, result.seed) == ("Hi you", 24000, 7)
    np.testing.assert_array_equal(result.audio, np.array([0.5, -0.5, 1], np.float32))


async def test_the_result_has_usage_and_edges(orchestrator: ScriptedOrchestrator) -> None:
    result = await _result(orchestrator, text("Hi"))
    assert result.finished.stages["thinker"].usage.output_tokens == 2
    assert [(edge.connector, edge.size_bytes) for edge in result.finished.edges] == [("shm", 300)]
    assert result.first_text_s is not None
    assert result.first_audio_s is None


async def test_arguments_reach_the_server(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    orchestrator.scripts.append([finished()])
    call = client.generate(
        "hello", max_tokens=9, seed=0, options={"speed": 1.5}, outputs=["text"], priority=-3, caller="me"
    )
    _ = [event async for event in call]
    request = orchestrator.requests[0]
    assert (request.input.text, list(request.outputs), request.request_id) == ("hello", ["text"], call.request_id)
    assert (request.parameters.sampling.max_tokens, request.parameters.options["speed"].number) == (9, 1.5)
    assert (request.priority, request.caller) == (-3, "me")
    assert request.parameters.HasField("seed")
    assert not request.parameters.sampling.HasField("temperature")


async def test_a_conversation_reaches_the_server(orchestrator: ScriptedOrchestrator) -> None:
    request = await _sent(orchestrator, messages=[("system", "Be brief."), ("user", "Hi")])
    turns = request.input.conversation.messages
    assert [(turn.role, turn.content) for turn in turns] == [(ROLE_SYSTEM, "Be brief."), (ROLE_USER, "Hi")]


async def test_media_reach_the_server_in_order(orchestrator: ScriptedOrchestrator, tmp_path: Path) -> None:
    (tmp_path / "cat.JPG").write_bytes(b"jpeg")
    samples = np.array([0.5, -0.5], np.float32)
    prompt: Content = [
        read_media(tmp_path / "cat.JPG"),
        "and",
        AudioSamples(samples, 8_000),
        AudioFile(b"wav", "audio/wav"),
        VideoFile(b"mp4", "video/mp4"),
    ]
    (message,) = (await _sent(orchestrator, prompt)).input.conversation.messages
    kinds = [part.WhichOneof("content") for part in message.parts]
    assert kinds == ["image", "text", "audio", "audio_file", "video_file"]
    assert (message.role, message.content, message.parts[0].image.media_type) == (ROLE_USER, "", "image/jpeg")
    sent = message.parts[2].audio
    assert (read_inline(sent.samples).tolist(), sent.sample_rate_hz) == ([0.5, -0.5], 8_000)


@pytest.mark.parametrize(("name", "problem"), [("cat.txt", "has none of the suffixes"), ("cat.png", "No such file")])
def test_a_file_that_is_not_a_medium_is_rejected(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match=problem):
        read_media(tmp_path / name)


async def test_every_sampling_argument_reaches_the_server(orchestrator: ScriptedOrchestrator) -> None:
    numbers: dict[str, float] = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 4,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "min_tokens": 2,
        "ignore_eos": True,
        "logprobs": 0,
    }
    lists = {"stop": ["end", "fin"], "stop_token_ids": [3, 4], "bad_words": ["bad"]}
    parameters = (await _sent(orchestrator, "hello", adapter="style", **numbers, **lists)).parameters
    assert {name: getattr(parameters.sampling, name) for name in numbers} == numbers
    assert {name: list(getattr(parameters.sampling, name)) for name in lists} == lists
    assert parameters.adapter == "style"
    assert parameters.sampling.HasField("logprobs")
    known = {field.name for field in parameters.sampling.DESCRIPTOR.fields if field.containing_oneof is None}
    assert known <= numbers.keys() | lists.keys()


@pytest.mark.parametrize(
    ("structure", "sent"),
    [
        ({"json_schema": {"type": "object"}}, '{"type": "object"}'),
        ({"json_schema": '{"type": "string"}'}, '{"type": "string"}'),
        ({"regex": "a+"}, "a+"),
        ({"grammar": 'start: "a"'}, 'start: "a"'),
        ({"allowed_texts": ["yes", "no"]}, ["yes", "no"]),
    ],
)
async def test_a_structure_reaches_the_server(
    orchestrator: ScriptedOrchestrator, structure: dict[str, object], sent: object
) -> None:
    sampling = (await _sent(orchestrator, "hello", **structure)).parameters.sampling
    (name,) = structure
    assert sampling.WhichOneof("structure") == name
    assert (list(sampling.allowed_texts.texts) if name == "allowed_texts" else getattr(sampling, name)) == sent


async def test_tools_and_their_calls_reach_the_server(orchestrator: ScriptedOrchestrator) -> None:
    messages: Conversation = [
        ("user", "How warm is it?"),
        Message("assistant", tool_calls=[ToolCall("c1", "weather", {"city": "Bern"})]),
        Message("tool", "12", tool_call_id="c1"),
    ]
    tools = [Tool("weather", "Tells the weather.", {"type": "object"})]
    request = await _sent(orchestrator, messages=messages, tools=tools, template_arguments={"thinking": False})
    sent = request.input.conversation
    assert (sent.messages[1].tool_calls[0].arguments, sent.messages[2].tool_call_id) == ('{"city": "Bern"}', "c1")
    assert [message.role for message in sent.messages] == [ROLE_USER, ROLE_ASSISTANT, ROLE_TOOL]
    assert (sent.tools[0].name, sent.tools[0].parameters) == ("weather", '{"type": "object"}')
    assert sent.template_arguments == '{"thinking": false}'


async def test_a_prompt_with_tools_becomes_a_conversation(orchestrator: ScriptedOrchestrator) -> None:
    sent = (await _sent(orchestrator, "Hi", tools=[Tool("weather")])).input
    assert (sent.WhichOneof("prompt"), sent.conversation.messages[0].content) == ("conversation", "Hi")


@pytest.mark.parametrize("prompt", [{"raw_text": "<image>?"}, {"token_ids": [5, 6]}], ids=str)
async def test_media_accompany_a_raw_prompt(orchestrator: ScriptedOrchestrator, prompt: dict[str, Any]) -> None:
    media: list[Medium] = [ImageFile(b"png", "image/png"), VideoFile(b"mp4", "video/mp4", use_audio_in_video=True)]
    sent = (await _sent(orchestrator, media=media, **prompt)).input
    assert (sent.WhichOneof("prompt"), len(sent.media)) == (next(iter(prompt)), 2)
    assert (sent.media[0].image.data, sent.media[1].use_audio_in_video) == (b"png", True)


async def test_logprobs_arrive_with_text_and_tokens(orchestrator: ScriptedOrchestrator) -> None:
    output = Output(name="codes", token_ids=TokenIds(ids=[5]))
    added = output.logprobs.add(sampled=request_pb2.TokenLogprob(id=5, text="Hi", logprob=-0.5), position=3)
    added.top.add(id=9, text="Ho", logprob=-1.5)
    said = Output(name="text", text="Hi", logprobs=output.logprobs)
    result = await _result(orchestrator, GenerateResponse(output=output), GenerateResponse(output=said))
    expected = TokenLogprobs(TokenLogprob(5, "Hi", -0.5), (TokenLogprob(9, "Ho", -1.5),), 3)
    assert result.logprobs == {"codes": (expected,), "text": (expected,)}


async def test_the_timeout_is_sent_as_the_deadline(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    orchestrator.scripts.append([finished()])
    _ = [event async for event in client.generate("hello", timeout_s=20)]
    assert orchestrator.deadlines_s[0] == pytest.approx(20, abs=2)


async def test_leaving_the_loop_cancels_the_request(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    orchestrator.scripts.append([admitted(), Pause.FOREVER])
    async for _event in client.generate("hello"):
        break
    assert await asyncio.wait_for(orchestrator.hung_up.wait(), 5)


async def test_a_generation_is_iterated_once(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    orchestrator.scripts.append([admitted(), text("Hi"), finished()])
    events = client.generate("hello")
    assert (await events.result()).text == "Hi"
    with pytest.raises(RuntimeError, match="call `generate` again"):
        await events.result()
    assert len(orchestrator.requests) == 1


async def test_a_cancelled_task_cancels_the_request(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    orchestrator.scripts.append([admitted(), Pause.FOREVER])
    asking = asyncio.create_task(client.generate("hello").result())
    await until(lambda: bool(orchestrator.requests), timeout_s=10)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await asyncio.wait_for(orchestrator.hung_up.wait(), 5)


@pytest.mark.parametrize("first", [[], [queued(1)]], ids=["at once", "in the queue"])
async def test_a_rejected_request_is_sent_again_with_its_id(
    orchestrator: ScriptedOrchestrator, generate: Generate, first: list[GenerateResponse]
) -> None:
    orchestrator.scripts.extend([[*first, errors.UnavailableError("it stops")], [admitted(), text("Hi"), finished()]])
    assert Text(output="text", delta="Hi") in await generate(orchestrator.endpoint)
    assert len({request.request_id for request in orchestrator.requests}) == 1


LOST = errors.UnavailableError("thinker-0 died", metadata={"stage": "thinker"})
REPEATED: dict[str, tuple[Script, errors.StagemeshError, int]] = {
    "before the admission": ([LOST], LOST, 3),
    "once admitted": ([admitted(), LOST], LOST, 1),
    "an overload without a time": ([full := errors.OverloadedError("too many bytes")], full, 1),
}


@pytest.mark.parametrize(("script", "error", "calls"), REPEATED.values(), ids=REPEATED)
async def test_retries_are_bounded(
    orchestrator: ScriptedOrchestrator, generate: Generate, script: Script, error: errors.StagemeshError, calls: int
) -> None:
    orchestrator.scripts.append(script)
    with pytest.raises(type(error), match=error.message) as caught:
        await generate(orchestrator.endpoint)
    assert error.metadata.items() <= caught.value.metadata.items()
    assert len(orchestrator.requests) == calls


async def test_a_queued_request_receives_its_position(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    orchestrator.scripts.append([queued(2), queued(1), admitted(), finished()])
    events = [event async for event in client.generate("hello")]
    assert events[:2] == [Queued("r", 2, 1.5), Queued("r", 1, 1.5)]


async def test_an_overloaded_server_is_called_later(orchestrator: ScriptedOrchestrator, generate: Generate) -> None:
    orchestrator.scripts.extend([[errors.OverloadedError("full", retry_after_s=0.05)], [admitted(), finished()]])
    await generate(orchestrator.endpoint)
    assert len(orchestrator.requests) == 2


async def test_a_deadline_in_the_past_sends_nothing(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    with pytest.raises(errors.DeadlineError, match="timeout_s"):
        await client.generate("hello", timeout_s=0).result()
    assert orchestrator.requests == []


async def test_the_deadline_ends_a_silent_request(orchestrator: ScriptedOrchestrator, generate: Generate) -> None:
    orchestrator.scripts.append([admitted(), Pause.FOREVER])
    with pytest.raises(errors.DeadlineError):
        await generate(orchestrator.endpoint, timeout_s=0.3)


async def test_a_stream_without_its_end_is_an_error(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    orchestrator.scripts.append([admitted(), text("Hi")])
    with pytest.raises(errors.InternalError, match="finished"):
        await client.generate("hello").result()


async def test_an_unreachable_server_is_named(generate: Generate) -> None:
    with pytest.raises(errors.UnavailableError, match=r"127\.0\.0\.1:1"):
        await generate("127.0.0.1:1", policy=RetryPolicy(attempts=1))


async def test_a_server_that_starts_late_is_reached(orchestrator: ScriptedOrchestrator) -> None:
    port_finder = Server("127.0.0.1:0")
    port = await port_finder.start()
    await port_finder.stop(grace_s=0)
    orchestrator.scripts.append([admitted(), finished()])
    late = Server(f"127.0.0.1:{port}")
    add_OrchestratorServiceServicer_to_server(orchestrator, late.grpc)
    async with AsyncClient(f"127.0.0.1:{port}") as client, asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(client.generate("hello").result())
        await asyncio.wait([waiting], timeout=0.2)
        await late.start()
    await late.stop(grace_s=0)
    assert waiting.result().request_id == "r"


async def test_a_prompt_over_the_message_limit_is_rejected_with_sizes(client: AsyncClient) -> None:
    with pytest.raises(errors.InvalidRequestError, match="9000") as caught:
        client.generate("x" * 9_000_000)
    assert caught.value.metadata["limit_bytes"] == str(8 << 20)


@pytest.mark.parametrize(
    ("prompt", "arguments", "message"),
    [
        (None, {}, "the request has no input"),
        ("a", {"token_ids": [1]}, "one of them"),
        (None, {"raw_text": "a", "messages": []}, "messages and raw_text are given"),
        (None, {"raw_text": "a", "tools": [Tool("t")]}, "tools and template_arguments need a prompt or messages"),
        (None, {"messages": [("robot", "a")]}, "role is 'robot'; use one of system, developer, user, assistant, tool"),
        ("a", {"seed": -1}, "cannot be sent"),
        ("a", {"regex": "a", "allowed_texts": ["b"]}, "regex and allowed_texts are given"),
        ("a", {"stop_token_ids": [-1]}, "cannot be sent"),
    ],
)
async def test_invalid_arguments_are_rejected(prompt: str | None, arguments: dict[str, object], message: str) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(errors.InvalidRequestError, match=message):
            client.generate(prompt, **arguments)  # type: ignore[arg-type]


async def test_cancel_of_an_unknown_request_is_an_error(client: AsyncClient) -> None:
    with raises(errors.NotFoundError, reason="UNKNOWN_REQUEST"):
        await client.cancel("nobody")


async def test_describe_shows_replicas(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    stage = orchestrator.description.stages.add(name="thinker", engine="vllm")
    stage.replicas.add(name="thinker-0", endpoint="h:1", state="REPLICA_STATE_LOADING", detail="weights", planned=2)
    replica = (await client.describe()).stages[0].replicas[0]
    assert (replica.name, replica.state, replica.planned) == ("thinker-0", stage_pb2.REPLICA_STATE_LOADING, 2)


async def test_many_requests_share_a_client(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    orchestrator.scripts.append([admitted(), text("Hi"), finished()])
    results = await asyncio.gather(*(client.generate("hello").result() for _ in range(8)))
    assert [result.text for result in results] == ["Hi"] * 8
