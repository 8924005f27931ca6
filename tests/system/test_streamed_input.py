"""Input that is streamed into running requests over edges from "@input", to stages that are real processes."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagemesh.common.errors import CancelledRequestError, InvalidRequestError
from stagemesh.orchestrator.admin.directory import Directory
from stagemesh.orchestrator.admin.inspection import Inspector
from tests.cli.commands import stagemesh
from tests.deployment import Deployment, deployed, metric_value
from tests.module_fixtures import made_for_module
from tests.system.pipelines import pipeline_file
from tests.system.streaming import Turn, orchestrating

ECHO = """
pipeline: echo
stages:
  writer: {engine: fake, function: source, options: {steps: 3}}
  echo: {engine: fake, function: relay, replicas: 2}
  loud: {engine: fake, function: relay, when: {output: loud}}
  slow: {engine: fake, function: relay, options: {step_s: 0.02}, data_plane: {window_bytes: 1000}}
edges:
  - {from: writer, to: echo, when: {input: stream, given: false}}
  - {from: "@input", to: echo}
  - {from: echo, to: loud}
  - {from: "@input", to: slow}
outputs: {written: writer, said: echo, loud: loud, slow: slow}
"""


file = made_for_module(lambda folder: pipeline_file(folder, ECHO))


@pytest.fixture(scope="module")
def up(file: Path) -> Iterator[Deployment]:
    with deployed(file, "--metrics") as deployment:
        yield deployment


async def test_outputs_follow_the_input_while_it_is_streamed(file: Path, up: Deployment) -> None:
    async with orchestrating(file, up) as orchestrator:
        turn = Turn(orchestrator, "spoken", "said", "loud")
        for word in ("one ", "two ", "three"):
            turn.say(word)
            await turn.until_heard("loud", word)
        assert await turn.result() == {"said": "one two three", "loud": "one two three"}


async def test_a_request_with_a_prompt_takes_the_other_edge(file: Path, up: Deployment) -> None:
    with up.client() as client:
        texts = client.generate("hi").result().texts
    assert texts.keys() == {"written", "said", "loud"}
    assert texts["written"] == texts["said"] == texts["loud"]


async def test_a_killed_consumer_receives_all_input_again(file: Path, up: Deployment) -> None:
    async with orchestrating(file, up) as orchestrator:
        turn = Turn(orchestrator, "killed", "said", "loud")
        turn.say("one ", "two ")
        await turn.until_heard("loud", "two")
        up.kill(turn.replica_of("echo"))
        turn.say("three ")
        await turn.until_heard("loud", "three")
        turn.say("four")
        assert await turn.result() == {"said": "one two three four", "loud": "one two three four"}
        assert turn.attempts == [("echo", 1), ("loud", 1), ("echo", 2)]
        assert turn.consumed_bytes == len("one two three four")
    up.wait(Deployment.all_ready)


async def test_a_slow_consumer_grants_credit_as_it_reads(file: Path, up: Deployment) -> None:
    async with orchestrating(file, up) as orchestrator:
        turn = Turn(orchestrator, "slow", "slow")
        turn.say(*(f"{number:99} " for number in range(100)))
        await turn.until_consumed(1_000)
        while len(turn.texts.get("slow", "")) < 5_000:
            unread_bytes = turn.consumed_bytes - len(turn.texts.get("slow", ""))
            assert unread_bytes <= 2_000, "the stage has accepted more than its window"
            await turn.until_consumed(turn.consumed_bytes + 1)
        assert (await turn.result())["slow"].endswith("99 ")
        assert turn.consumed_bytes == turn.stream.size_bytes == 10_000


async def test_input_is_consumed_when_each_stage_has_accepted_it(file: Path, up: Deployment) -> None:
    async with orchestrating(file, up) as orchestrator:
        turn = Turn(orchestrator, "both", "said", "slow")
        turn.say(*(f"{number:99} " for number in range(100)))
        await turn.until_heard("said", "99 ")
        assert turn.consumed_bytes < turn.stream.size_bytes
        texts = await turn.result()
        assert texts["said"] == texts["slow"]
        assert turn.consumed_bytes == turn.stream.size_bytes


async def test_a_cancelled_request_releases_its_stages_and_its_input(file: Path, up: Deployment) -> None:
    async with orchestrating(file, up) as orchestrator:
        turn = Turn(orchestrator, "cancelled", "said", "slow")
        turn.say(*("x" * 100 for _ in range(100)))
        await turn.until_heard("said", "x")
        await orchestrator.cancel("cancelled")
        assert isinstance(await turn.failure(), CancelledRequestError)
        turn.say("too late")
        assert turn.consumed_bytes == turn.stream.size_bytes
    assert await asyncio.to_thread(up.idle)


async def test_an_aborted_input_fails_its_request(file: Path, up: Deployment) -> None:
    async with orchestrating(file, up) as orchestrator:
        turn = Turn(orchestrator, "aborted", "said")
        turn.say("one ")
        await turn.until_heard("said", "one")
        turn.stream.abort(InvalidRequestError("the audio is broken", reason="INVALID_MEDIA"))
        error = await turn.failure()
        assert (error.reason, error.message) == ("INVALID_MEDIA", "the audio is broken")


async def test_an_operator_sees_what_the_input_waits_for(file: Path, up: Deployment) -> None:
    async with orchestrating(file, up) as orchestrator:
        turn = Turn(orchestrator, "waiting", "said")
        turn.say("one ", "two ")
        await turn.until_heard("said", "two")
        inspector = Inspector(orchestrator, Directory(orchestrator.pipeline, orchestrator.fleet))
        inspected = await inspector.inspect("waiting")
        assert [step.waits_for for step in inspected.steps] == [
            "input of the client on edge @input->echo, of which 2 chunks have arrived"
        ]
        await turn.result()
        edge = next(each for each in inspector.edges(orchestrator.totals) if each.edge.name == "@input->echo")
        assert (edge.edge.from_stage, edge.chunks, edge.size_bytes) == ("@input", 2, 8)


async def test_the_command_line_shows_who_sends_the_input(up: Deployment) -> None:
    ran = await stagemesh("stages", "--server", up.endpoint)
    assert ["@input->echo", "from", "the", "orchestrator", "grpc"] in [line.split() for line in ran.stdout.splitlines()]


def test_an_orchestrator_counts_the_input_that_it_sends(up: Deployment) -> None:
    pieces = ("one ", "two ", "three")
    with up.client() as client, client.converse(input_mode="stream", outputs=["said"]) as session:
        session.append(*pieces)
        session.commit()
        assert list(session.answer())
    metrics, labels = up.scrape("orchestrator"), {"edge": "@input->echo", "connector": "grpc"}
    assert metric_value(metrics, "stagemesh_sent_bytes_total", **labels) == len("".join(pieces))
    chunks = metric_value(metrics, "stagemesh_chunk_transfer_seconds_count", **labels)
    assert chunks == metric_value(metrics, "stagemesh_edge_chunks_total", edge="@input->echo") > 0
    assert metric_value(metrics, "stagemesh_chunk_transfer_seconds_sum", **labels) > 0
