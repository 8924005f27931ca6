"""Pipelines that fork and join. Their outputs equal those of the same functions called one after the other."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stagemesh.client import Client, Result
from stagemesh.common.plugins.connectors import descriptors
from stagemesh.common.wire.tensors import Array
from stagemesh.fake_engine.outputs import mix, resize_text, source_text, text_to_frames
from stagemesh.services.engines.base import Task
from tests.deployment import eventually
from tests.local_mesh import LocalMesh, local_mesh

GRAPH = Path(__file__).parents[2] / "examples/graph/pipeline.yaml"
STEPS, SIZE_BYTES = 10, 20_000
OTHER = "auto" if descriptors()["nixl"].missing() else "nixl"


@pytest.fixture(scope="module")
def graph() -> Iterator[LocalMesh]:
    with local_mesh(GRAPH, overrides={"edges.words->mixer.connector": OTHER}) as up:
        yield up


@pytest.fixture
def client(graph: LocalMesh) -> Iterator[Client]:
    with graph.client() as client:
        yield client
        eventually(graph.idle, timeout_s=10)


def texts_in_a_row(seed: int) -> list[Array]:
    return [resize_text(source_text(Task("r", seed, "hello"), step), SIZE_BYTES) for step in range(STEPS)]


def frames_in_a_row(seed: int, *, words: bool) -> bytes:
    texts = texts_in_a_row(seed)
    return b"".join(mix(text if words else None, text_to_frames(text)).tobytes() for text in texts)


def frames(result: Result) -> bytes:
    return b"".join(output.tensor.tobytes() for output in result.tensors["frames"])


def test_a_fork_and_join_over_different_connectors_outputs_the_bytes_of_its_functions(client: Client) -> None:
    result = client.generate("hello", seed=7).result()
    assert frames(result) == frames_in_a_row(7, words=True)
    assert result.text.encode() == b"".join(text.tobytes() for text in texts_in_a_row(7))
    other = "nixl" if OTHER == "nixl" else "shm"
    used = {edge.edge: edge.connector for edge in result.finished.edges}
    assert used == {"writer->words": "shm", "writer->frames": "grpc", "words->mixer": other, "frames->mixer": "shm"}


def test_an_edge_that_a_request_leaves_out_delays_nothing(client: Client) -> None:
    result = client.generate("hello", seed=7, options={"words": 0.0}, timeout_s=10).result()
    assert frames(result) == frames_in_a_row(7, words=False)
    assert {edge.edge for edge in result.finished.edges} == {"writer->frames", "frames->mixer"}


def test_edges_marked_apart_deliver_each_packet_once() -> None:
    with local_mesh(GRAPH, overrides={"stages.mixer.join": "any"}) as up, up.client() as client:
        outputs = client.generate("hello", seed=7).result().tensors["frames"]
        texts = texts_in_a_row(7)
        apart = [mix(text, None) for text in texts] + [mix(None, text_to_frames(text)) for text in texts]
        assert sorted(output.tensor.tobytes() for output in outputs) == sorted(each.tobytes() for each in apart)
        eventually(up.idle, timeout_s=10)


def test_a_rehearsal_is_reproduced_exactly_on_any_replica() -> None:
    with local_mesh(GRAPH.parents[1] / "rehearsal/pipeline.yaml") as up, up.client() as client:
        first, second, other = [client.generate("hello", seed=seed, max_tokens=8).result() for seed in (1, 1, 2)]
        assert first.audio.tobytes() == second.audio.tobytes() != other.audio.tobytes()
        assert first.text == second.text
        assert len(first.audio) % (8 * 8) == 0
        assert first.first_audio_s is not None
        assert first.first_audio_s < first.total_s
        eventually(up.idle, timeout_s=10)
