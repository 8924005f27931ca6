"""The client in TypeScript: results, usage, and requests that survive the loss of a connection or an orchestrator."""

import asyncio
import base64
import signal
from asyncio.subprocess import PIPE
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stagemesh.client import Result
from stagemesh.common.errors import InternalError, OverloadedError, StagemeshError, UnavailableError
from stagemesh.common.process.config import TokenConfig
from stagemesh.rpc.authentication import TokenChecker, TokenEntry, add_token
from stagemesh.v1 import request_pb2
from stagemesh.v1.orchestrator_pb2 import GenerateResponse
from tests.client.scripted import (
    Pause,
    ScriptedOrchestrator,
    admitted,
    audio,
    ended,
    finished,
    progress,
    queued,
    served,
    text,
)
from tests.credentials import issue, process_credentials
from tests.deployment import Deployment
from tests.later_contract import later_class
from tests.system.breakable_relay import breakable_relay
from tests.typescript.nodes import PACKAGE, node, running_client

STEPS = 30


@pytest.fixture(scope="module")
def undisturbed(relays_up: Deployment) -> Result:
    with relays_up.client() as client:
        return client.generate("hello", seed=7).result()


@dataclass
class Received:
    """The events that the client in TypeScript received."""

    texts: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    """The text of each choice, by the index of the choice."""
    frames: bytes = b""
    kinds: list[str] = field(default_factory=list[str])
    finishes: dict[str, int] = field(default_factory=dict[str, int])
    stages: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def text(self) -> str:
        return self.texts[0]

    def add(self, kind: str, value: dict[str, Any]) -> None:
        self.kinds.append(kind)
        if kind == "finished":
            self.stages = value["choices"][0]["stages"]
        if kind != "output":
            return
        content = value.get("content", {"$case": ""})
        if content["$case"] == "text":
            assert int(value["position"]) == len(self.texts[value["index"]].encode())
            self.texts[value["index"]] += content["value"]
        if content["$case"] == "tensor":
            self.frames += base64.b64decode(content["value"]["location"]["value"])
        if "finish" in value:
            key = value["name"] if not value["index"] else f"{value['name']} of choice {value['index']}"
            assert key not in self.finishes
            self.finishes[key] = value["finish"]["reason"]


async def receive(endpoints: str, *arguments: str, at: dict[int, Callable[[], None]] | None = None) -> Received:
    """Runs a request and receives everything. Calls a function when a number of texts has arrived."""
    received, texts, actions = Received(), 0, dict(at or {})
    async with running_client(endpoints, "hello", *arguments) as client:
        async for kind, value in client:
            received.add(kind, value)
            if kind == "output" and value["name"] == "text":
                texts += 1
                if texts in actions:
                    actions.pop(texts)()
        assert await client.process.wait() == 0, await client.error()
    assert not actions, "something was not done"
    return received


async def error_of(endpoints: str, *arguments: str) -> str:
    """Runs a request that fails. Returns what the client prints."""
    async with running_client(endpoints, "hello", *arguments) as client:
        return await client.error()


def check(received: Received, undisturbed: Result) -> None:
    """Checks that nothing is lost or doubled."""
    assert received.text == undisturbed.text
    assert received.frames == b"".join(output.tensor.tobytes() for output in undisturbed.tensors["frames"])
    assert received.finishes == {"text": request_pb2.FINISH_REASON_END, "frames": request_pb2.FINISH_REASON_END}
    assert (received.kinds.count("admitted"), received.kinds.count("finished")) == (1, 1)
    assert received.kinds[-1] == "finished"


async def test_outputs_usage_and_finish_reasons_arrive(relays_up: Deployment, undisturbed: Result) -> None:
    received = await receive(relays_up.endpoint, "--seed", "7")
    check(received, undisturbed)
    usages = {stage: report["usage"] for stage, report in received.stages.items()}
    assert {stage: int(usage["outputTokens"]) for stage, usage in usages.items()} == {
        stage: report.usage.output_tokens for stage, report in undisturbed.finished.stages.items()
    }
    (edge,) = received.stages["source"]["edges"]
    assert (edge["edge"], int(edge["sizeBytes"])) == ("source->relay", len(undisturbed.text))


async def test_killed_orchestrator_loses_and_doubles_nothing(relays_up: Deployment, undisturbed: Result) -> None:
    kill = {STEPS // 3: lambda: relays_up.kill("orchestrator")}
    check(await receive(relays_up.endpoint, "--seed", "7", at=kill), undisturbed)


async def test_broken_connections_lose_and_double_nothing(relays_up: Deployment, undisturbed: Result) -> None:
    with breakable_relay(relays_up.endpoint) as way:
        received = await receive(way.endpoint, "--seed", "7", at=dict.fromkeys((1, 5, 6, 20), way.cut))
    check(received, undisturbed)


async def test_next_call_sends_the_ends_of_what_has_arrived(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.scripts.append([admitted(seed=9), text("Zoë😀"), text("\ufeffe\u0301€"), audio([0.5, 1]), Pause.BREAK])
    orchestrator.scripts.append([admitted(seed=9), text("!"), finished()])
    received = await receive(orchestrator.endpoint)
    first, second = orchestrator.requests
    assert received.text == "Zoë😀\ufeffe\u0301€!"
    assert {each.name: each.position for each in second.next_positions} == {"text": 17, "audio": 2}
    assert (second.parameters.seed, second.earlier_calls, second.request_id) == (9, 1, first.request_id)
    assert not first.parameters.HasField("seed")
    assert not first.HasField("admitted_call")
    assert (second.admitted_call, dict(second.preferred_replicas)) == (0, {"thinker": "thinker-0"})
    assert (first.generation, second.generation) == ("", "g")
    assert first.linger_s == second.linger_s == 30


async def test_request_without_outputs_may_restart_in_another_generation(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.scripts.append([admitted(generation="old"), Pause.BREAK])
    orchestrator.scripts.append([admitted(generation="new"), text("Hi"), Pause.BREAK])
    orchestrator.scripts.append([admitted(generation="new"), text("!"), finished()])
    assert (await receive(orchestrator.endpoint)).text == "Hi!"
    assert [request.generation for request in orchestrator.requests] == ["", "", "new"]


async def test_each_choice_continues_at_its_own_position(orchestrator: ScriptedOrchestrator) -> None:
    before = [admitted(choices=2), progress("a", steps=2), text("ab"), text("x", index=1), ended()]
    after = [admitted(choices=2), progress("a", steps=1), progress("a", steps=1, index=1)]
    orchestrator.scripts.append([*before, Pause.BREAK])
    orchestrator.scripts.append([*after, ended(), text("yz", index=1), ended(index=1), finished(2)])
    received = await receive(orchestrator.endpoint, "--choices", "2")
    first, second = orchestrator.requests
    assert (received.texts, received.kinds.count("progress")) == ({0: "ab", 1: "xyz"}, 2)
    assert received.finishes == dict.fromkeys(("text", "text of choice 1"), request_pb2.FINISH_REASON_END)
    assert {each.index: each.position for each in second.next_positions} == {0: 2, 1: 1}
    assert (first.parameters.choices, second.parameters.choices) == (2, 2)


async def test_repeated_events_are_dropped(orchestrator: ScriptedOrchestrator) -> None:
    events = [admitted(), progress("thinker", steps=3), text("Hi"), ended()]
    orchestrator.scripts.append([queued(2), *events, Pause.BREAK])
    again = [queued(1), *events[:2], progress("thinker", steps=4), ended(), finished()]
    orchestrator.scripts.append([*again, Pause.BREAK])
    orchestrator.scripts.append([admitted(), finished()])
    received = await receive(orchestrator.endpoint)
    assert received.kinds == ["queued", "admitted", "progress", "output", "output", "progress", "finished"]


async def test_another_orchestrator_takes_over() -> None:
    async with served() as first, served() as second:
        first.scripts.append([admitted(), text("Hi "), UnavailableError("it stops", reason="NOT_RUNNING")])
        second.scripts.append([admitted(), text("you"), finished()])
        assert (await receive(f"{first.endpoint},{second.endpoint}")).text == "Hi you"


async def test_full_queue_is_tried_again_when_it_says(orchestrator: ScriptedOrchestrator) -> None:
    full = OverloadedError("the queue is full", reason="ADMISSION_LIMIT", retry_after_s=0.01)
    orchestrator.scripts.extend([[full], [full], [queued(1), admitted(), text("Hi"), finished()]])
    assert (await receive(orchestrator.endpoint)).text == "Hi"
    assert [request.earlier_calls for request in orchestrator.requests] == [0, 1, 2]


@pytest.mark.parametrize(
    "error",
    [InternalError("out of luck"), OverloadedError("too late", reason="CALLER_LIMIT", retry_after_s=0.01)],
    ids=["final", "after the start"],
)
async def test_other_errors_are_final(orchestrator: ScriptedOrchestrator, error: StagemeshError) -> None:
    orchestrator.scripts.append([admitted(), error])
    assert error.message in await error_of(orchestrator.endpoint)
    assert len(orchestrator.requests) == 1


async def test_an_answer_above_the_limit_is_not_an_overload(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.scripts.append([admitted(), text("x" * (9 << 20))])
    error = await error_of(orchestrator.endpoint)
    assert "MESSAGE_TOO_LARGE: a message is too large (SERVER: Sent message larger than max" in error
    assert len(orchestrator.requests) == 1


_LARGE = f"""
import {{ StagemeshClient }} from "{PACKAGE}/dist/index.js";
const client = new StagemeshClient([process.argv[1]]);
try {{
  for await (const event of client.generate("x".repeat(9 << 20))) console.log(event.$case);
}} catch ({{ code, reason, message }}) {{
  console.log(code, reason, message);
}}
client.close();
"""


async def test_a_request_above_the_limit_is_not_an_overload(orchestrator: ScriptedOrchestrator) -> None:
    command = (node(), "--input-type=module", "-e", _LARGE, orchestrator.endpoint)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    async with asyncio.timeout(30):
        printed, _ = await process.communicate()
    assert printed.decode().startswith("3 MESSAGE_TOO_LARGE a message is too large (Attempted to send message")
    assert not orchestrator.requests


async def test_interrupted_client_cancels_its_request(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.scripts.append([admitted(), Pause.FOREVER])
    async with running_client(orchestrator.endpoint, "hello", "--request-id", "mine") as client:
        await anext(aiter(client))
        client.process.send_signal(signal.SIGINT)
        assert "aborted" in await client.error()
    await asyncio.wait_for(orchestrator.hung_up.wait(), 10)
    assert [(cancel.request_id, cancel.when_left) for cancel in orchestrator.cancels] == [("mine", True)]


def _later(*, ignorable: bool) -> GenerateResponse:
    """Returns an event of a kind that today's contract does not know."""
    event = later_class("GenerateResponse")(later="news", ignorable=ignorable)
    return GenerateResponse.FromString(event.SerializeToString())


async def test_event_of_a_later_kind_is_refused_or_ignored(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.scripts.append([admitted(), _later(ignorable=True), text("Hi"), finished()])
    orchestrator.scripts.append([admitted(), _later(ignorable=False)])
    assert (await receive(orchestrator.endpoint)).text == "Hi"
    assert "UNKNOWN_KIND: the orchestrator sent a GenerateResponse" in await error_of(orchestrator.endpoint)


async def test_orchestrator_without_a_common_version_is_refused(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.description.protocol.lowest_version = 2
    orchestrator.description.protocol.highest_version = 3
    assert "NO_COMMON_VERSION" in await error_of(orchestrator.endpoint)


@pytest.mark.parametrize("by_token", [False, True])
async def test_a_client_identifies_itself_by_a_certificate_or_a_token(tmp_path: Path, *, by_token: bool) -> None:
    (tmp_path / "token").write_text("secret\n")
    add_token(tmp_path / "tokens.json", "secret", TokenEntry("alice"))
    checker = TokenChecker(TokenConfig(file=str(tmp_path / "tokens.json"))) if by_token else None
    folder = issue(tmp_path, "client/alice")
    arguments = ["--tls", str(folder)]
    if by_token:
        for name in ("tls.crt", "tls.key"):
            (folder / name).unlink()
        arguments += ["--token-file", str(tmp_path / "token")]
    with process_credentials(issue(tmp_path, "orchestrator/main")):
        async with served(tokens=checker) as orchestrator:
            orchestrator.scripts.append([admitted(), text("hi"), ended("text"), finished()])
            assert (await receive(orchestrator.endpoint, *arguments)).text == "hi"


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--tls", "nowhere"], "ca.crt"), (["--token-file", "token"], "a token needs TLS")]
)
async def test_half_an_identity_is_an_error(arguments: list[str], message: str) -> None:
    assert message in await error_of("127.0.0.1:1", *arguments)


_CANCEL = """
import { StagemeshClient } from "stagemesh";
const client = new StagemeshClient(process.argv[1].split(","));
await client.cancel("mine");
await client.cancel("unknown").catch(({ reason }) => console.log(reason));
console.log((await client.describe()).protocol.highestVersion);
client.close();
"""


async def test_a_request_is_cancelled_by_its_id() -> None:
    async with served() as other, served() as orchestrator:
        orchestrator.scripts.append([admitted(), Pause.FOREVER])
        async with running_client(orchestrator.endpoint, "hello", "--request-id", "mine") as client:
            await anext(aiter(client))
            command = (node(), "--input-type=module", "-e", _CANCEL, f"{other.endpoint},{orchestrator.endpoint}")
            cancelling = await asyncio.create_subprocess_exec(*command, cwd=PACKAGE, stdout=PIPE)
            printed, _ = await cancelling.communicate()
        assert printed.decode().split() == ["UNKNOWN_REQUEST", "1"]
        assert ("mine", False) in [(cancel.request_id, cancel.when_left) for cancel in orchestrator.cancels]
