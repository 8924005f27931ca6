"""The test vectors of the protocol (protos/vectors), against the code of Stagemesh that they describe.

tests/connectors/test_wire.py checks the vectors of the digest. Vectors of messages are cases of the tool.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.plugins.descriptors import Emitted
from stagemesh.common.wire.chunk_sizes import FramesPolicy, WholePolicy
from stagemesh.common.wire.tensors import Tensors, TensorSpec
from stagemesh.connectors.flow.chunking import Chunker
from stagemesh.connectors.flow.received_rows import PacketQueue
from stagemesh.connectors.packets import CONTEXT, TOKEN_START, MetadataValue, Packet, RowCounter, rows_of
from stagemesh.services.engines.base import END, Emission
from stagemesh.services.stage.step.outputs import StreamedOutputs
from stagemesh.stage_conformance.cases import CASES
from stagemesh.stage_conformance.suites import register_cases
from tests.rpc.call_errors import raises

register_cases()

FOLDER = Path(__file__).parents[2] / "protos" / "vectors"
Vector = dict[str, Any]


def vectors(name: str) -> pytest.MarkDecorator:
    """Returns a decorator that runs a test for each vector of a file."""
    found = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return pytest.mark.parametrize("vector", found, ids=[each["name"] for each in found])


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_each_vector_has_a_name_and_a_description(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    names = [each["name"] for each in found]
    assert len(set(names)) == len(names)
    # The names of the digest's vectors describe them.
    assert path.stem == "digest" or all(each["description"].endswith(".") for each in found)


@pytest.mark.parametrize(
    ("file", "part"),
    {
        "consumer": "consumer",
        "fragments": "consumer.fragments",
        "chunks": "consumer.chunk",
        "steps": "steps.refuses",
        "rows": "consumer.rows",
        "text": "steps.text",
        "chunk_policies": "producer.policy",
        "producer": "producer.reply",
    }.items(),
)
def test_each_vector_is_a_case(file: str, part: str) -> None:
    names = {f"{part}.{each['name']}" for each in json.loads((FOLDER / f"{file}.json").read_text(encoding="utf-8"))}
    assert names <= {each.name for each in CASES}


@vectors("text")
def test_text_is_divided_between_characters(vector: Vector) -> None:
    outputs = StreamedOutputs(["text"], {"text": Emitted(TensorSpec("uint8", ("bytes",)), kind="text")})
    found: list[Vector | None] = []
    for emitted in vector["emitted"]:
        parts = outputs.push(Emission(Packet({"text": np.frombuffer(bytes.fromhex(emitted), np.uint8)})))
        found += [{"position": each.output.position, "text": each.output.text} for each in parts] or [None]
    assert found == vector["parts"]
    (last,) = outputs.finish(END)
    assert {"position": last.output.position, "text": last.output.text} == vector["last"]


@vectors("chunk_policies")
def test_emissions_are_cut_into_chunks(vector: Vector) -> None:
    rows = np.arange(sum(vector["emissions"]), dtype=np.int32)
    ends = np.cumsum(vector["emissions"])
    emitted = [Packet({"x": rows[end - count : end]}) for count, end in zip(vector["emissions"], ends, strict=True)]
    chunks, positions, found = emitted, RowCounter({}), list[Vector]()
    if vector["policy"]:
        frames = vector["policy"].get("frames")
        chunker = Chunker(WholePolicy() if frames is None else _frames_policy(**frames))
        chunks = [chunk for each in emitted for chunk in chunker.push(each)] + chunker.finish()
    for chunk in chunks:
        (first_row,) = positions.add(rows_of(chunk), context=int(str(chunk.metadata.get(CONTEXT, 0))))
        assert chunk.tensors["x"].tolist() == rows[first_row : first_row + len(chunk.tensors["x"])].tolist()
        found.append({"first_row": first_row, "rows": len(chunk.tensors["x"]), **chunk.metadata})
    assert found == vector["chunks"]


def _frames_policy(frames: int, ramp: Sequence[int] = (), left_context_frames: int = 0) -> FramesPolicy:
    return FramesPolicy(frames, tuple(ramp), left_context_frames)


@vectors("rows")
def test_each_row_is_kept_once(vector: Vector) -> None:
    queue = PacketQueue(edge="e")
    for each in vector["received"]:
        queue.new_part(*_packet(each))
    queue.begin({})
    kept: list[Packet] = []
    if "error" in vector:
        with raises(InvalidChunkError, reason=vector["error"]):
            _take(queue, vector, kept)
    else:
        _take(queue, vector, kept)
    assert [_rows(each) for each in kept] == [_rows(_packet(each)[0]) for each in vector["kept"]]


def _take(queue: PacketQueue, vector: Vector, kept: list[Packet]) -> None:
    for each in vector["again"]:
        new = queue.new_part(*_packet(each))
        kept += [new] if new is not None else []
    if vector.get("end"):
        queue.accept_end()


def _places(chunk: Vector) -> list[tuple[str, tuple[int, int]]]:
    """Returns the first row and the number of rows of each tensor of a chunk, by name."""
    return list(chunk["tensors"].items())


def _packet(chunk: Vector) -> tuple[Packet, list[tuple[str, int]], list[int]]:
    """Returns a packet whose rows contain their numbers, the number of its rows by name, and its first rows."""
    tensors: Tensors = {name: np.arange(first, first + rows) for name, (first, rows) in _places(chunk)}
    metadata: dict[str, MetadataValue] = {name: chunk[name] for name in (CONTEXT, TOKEN_START) if name in chunk}
    packet = Packet(tensors, metadata)
    return packet, rows_of(packet), [first for _, (first, _) in _places(chunk)]


def _rows(packet: Packet) -> tuple[Mapping[str, list[int]], Mapping[str, object]]:
    return {name: tensor.tolist() for name, tensor in packet.tensors.items()}, packet.metadata
