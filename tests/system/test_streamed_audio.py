"""Audio that is streamed into a function stage, which resumes from a checkpoint after its process was killed."""

from pathlib import Path

import numpy as np
import pytest

from stagemesh.orchestrator.request.streamed_input import packets_of
from stagemesh.v1 import request_pb2, tensor_pb2
from tests.deployment import deployed
from tests.system.added_transforms import add_function
from tests.system.pipelines import pipeline_file
from tests.system.streaming import Turn, orchestrating

CHECKPOINT_SAMPLES, PIECE_SAMPLES, RATE_HZ = 1_000, 400, 16_000
METER = """\
import numpy as np
from stagemesh.common.plugins.descriptors import Emitted, FunctionDescriptor, Signature
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Saves

_TEXT = Emitted(TensorSpec.parse("uint8[bytes]"), kind="text")
DESCRIPTOR = FunctionDescriptor(
    Signature(accepts={"audio": TensorSpec.parse("float32[samples]")}, emits={"text": _TEXT}), "added_meter:Meter"
)


class Meter(Saves):
    def __init__(self, model, options):
        pass

    def open(self, *, seed, options):
        return np.zeros(1, np.int64)

    def __call__(self, batch):
        return [[self._measured(call.state, call.packet)] if call.packet else [] for call in batch]

    def _measured(self, count, packet):
        count += len(packet.tensors["audio"])
        text = f"{count[0]} samples at {packet.metadata['sample_rate_hz']} Hz, {packet.tensors['audio'].sum():.0f}; "
        return Packet({"text": np.frombuffer(text.encode(), np.uint8)})

    def save(self, state):
        return {"count": state.copy()}

    def restore(self, tensors, *, seed, options):
        return tensors["count"].copy()
"""
"""Counts the samples that it has received, and reports them after each packet."""
PIPELINE = f"""
pipeline: meter
stages:
  meter: {{engine: function, function: meter, replicas: 2, options: {{checkpoint_rows: {CHECKPOINT_SAMPLES}}}}}
edges: [{{from: "@input", to: meter}}]
outputs: {{text: meter}}
"""


def _piece(number: int) -> request_pb2.Part:
    data = np.full(PIECE_SAMPLES, number, np.float32).tobytes()
    samples = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[PIECE_SAMPLES], inline=data)
    return request_pb2.Part(audio=request_pb2.Audio(samples=samples, sample_rate_hz=RATE_HZ))


def _report(number: int) -> str:
    return f"{(number + 1) * PIECE_SAMPLES} samples at {RATE_HZ} Hz, {number * PIECE_SAMPLES}; "


def _append(turn: Turn, numbers: range) -> None:
    for number in numbers:
        for packet in packets_of(_piece(number), kinds={"audio"}):
            turn.stream.append(packet)


async def test_a_killed_function_resumes_within_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_function(tmp_path, monkeypatch, name="meter", source=METER)
    file = pipeline_file(tmp_path, PIPELINE)
    with deployed(file) as up:
        async with orchestrating(file, up) as orchestrator:
            turn = Turn(orchestrator, "measured")
            _append(turn, range(10))
            await turn.until_heard("text", _report(9))
            up.kill(turn.replica_of("meter"))
            _append(turn, range(10, 15))
            assert await turn.result() == {"text": "".join(map(_report, range(15)))}
            first, second = turn.known.record.timeline.steps
            assert (first.attempt, second.attempt, bool(second.resumed_engine_steps)) == (1, 2, True)
