"""A pipeline with two stages that choose tokens: parameters of one stage leave the other stage alone."""

import math
from collections.abc import Iterator

import pytest

from stagemesh.client import Client, StageArguments
from stagemesh.common.errors import InvalidRequestError, UnsupportedError
from tests.local_mesh import LocalMesh, local_mesh

SCHEMA = '{"type": "object"}'
OMNI = """
pipeline: omni
main_stage: thinker
stages:
  thinker: {engine: fake, function: source, options: {steps: 6}}
  talker: {engine: fake, function: talk}
  frames: {engine: fake, function: frames}
edges:
  - {from: thinker, to: talker}
  - {from: talker, to: frames, chunk: {frames: 25, ramp: [5, 10]}}
outputs: {text: thinker, speech: talker, frames: frames}
"""


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalMesh]:
    path = tmp_path_factory.mktemp("omni") / "omni.yaml"
    path.write_text(OMNI)
    with local_mesh(path) as up:
        yield up


@pytest.fixture
def client(omni: LocalMesh) -> Iterator[Client]:
    with omni.client() as client:
        yield client


def test_parameters_of_the_thinker_leave_the_talker_alone(client: Client) -> None:
    whole = client.generate("hello", seed=1).result()
    assert whole.texts["speech"] == whole.texts["text"]
    assert whole.texts["text"].count("Step") == 6
    limited = client.generate("hello", seed=1, max_tokens=2, json_schema=SCHEMA).result()
    # The talker repeats what it receives. Its own limits would shorten or replace it.
    assert limited.texts == {"text": SCHEMA * 2, "speech": SCHEMA * 2}
    stopped = client.generate("hello", seed=1, stop=["Step 3"]).result()
    assert stopped.texts["speech"] == stopped.texts["text"] == whole.texts["text"].partition("Step 3")[0]


def test_parameters_of_the_talker_leave_the_thinker_alone(client: Client) -> None:
    whole = client.generate("hello", seed=1).result().texts["text"]
    limited = client.generate("hello", seed=1, stages={"talker": {"max_tokens": 2}}).result()
    assert limited.texts == {"text": whole, "speech": whole[: whole.index("Step 2")]}
    stopped = client.generate("hello", seed=1, stages={"talker": {"stop": ["Step 1"]}}).result()
    assert stopped.texts == {"text": whole, "speech": whole[: whole.index("Step 1")]}
    structured = client.generate("hello", seed=1, stages={"talker": {"json_schema": SCHEMA}}).result()
    assert structured.texts == {"text": whole, "speech": SCHEMA * 6}


def test_parameters_for_an_unknown_stage_are_refused(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="stages thinker, talker") as caught:
        client.generate("hello", stages={"singer": {"max_tokens": 2}}).result()
    assert caught.value.reason == "UNKNOWN_STAGE"
    with pytest.raises(UnsupportedError, match="'talker' accepts no adapters"):
        client.generate("hello", stages={"talker": {"adapter": "warm"}}).result()


def test_a_request_sets_its_first_chunk(client: Client) -> None:
    arguments: dict[int | None, StageArguments] = {5: {}, 8: {"chunk": 8}, None: {"chunk": "whole"}}
    frames: dict[int | None, bytes] = {}
    for first, given in arguments.items():
        result = client.generate("hello", seed=1, outputs=["speech", "frames"], stages={"frames": given}).result()
        frames[first] = b"".join(output.tensor.tobytes() for output in result.tensors["frames"])
        rows = len(result.texts["speech"].encode())
        ramp = () if first is None else (first, 10)
        (chunks,) = (edge.chunks for edge in result.finished.edges if edge.edge == "talker->frames")
        assert chunks == (len(ramp) + math.ceil((rows - sum(ramp)) / 25) if ramp else 1)
    assert len(set(frames.values())) == 1
    with pytest.raises(InvalidRequestError, match="use 5 to 25") as caught:
        client.generate("hello", stages={"frames": {"chunk": 26}}).result()
    assert caught.value.reason == "INVALID_INITIAL_FRAMES"
    with pytest.raises(InvalidRequestError, match="chunk is 'most'; give the number of frames of the first chunk"):
        client.generate("hello", stages={"frames": {"chunk": "most"}})  # type: ignore[typeddict-item]
