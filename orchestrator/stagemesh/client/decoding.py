"""From the wire's events to ours. What does not hold together raises InvalidChunkError."""

import numpy as np

from stagemesh.client.events import (
    Admitted,
    AudioChunk,
    EdgeUsage,
    Event,
    Finished,
    Image,
    Progress,
    Queued,
    StageReport,
    TensorOutput,
    Text,
    Timings,
    TokenLogprobs,
    Tokens,
    Usage,
)
from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.tensors import read_inline
from stagemesh.v1 import orchestrator_pb2, request_pb2, stage_pb2


def decode_event(response: orchestrator_pb2.GenerateResponse) -> Event | None:
    """The event in `response`; None for a kind that a newer server added."""
    match response.WhichOneof("event"):
        case "admitted":
            admitted = response.admitted
            return Admitted(admitted.request_id, admitted.seed, dict(admitted.replicas))
        case "queued":
            queued = response.queued
            return Queued(queued.request_id, queued.position, queued.expected_wait_s)
        case "progress":
            return _progress(response.progress)
        case "output":
            return _output(response.output)
        case "finished":
            stages = {name: _report(stage) for name, stage in response.finished.stages.items()}
            return Finished(stages, _timings(response.finished.timings))
        case None:
            return None


def _progress(message: orchestrator_pb2.RequestProgress) -> Progress:
    steps = message.progress
    return Progress(message.stage, steps.steps, steps.total_steps if steps.HasField("total_steps") else None)


def _output(message: request_pb2.Output) -> Event | None:
    match message.WhichOneof("content"):
        case "text":
            return Text(message.name, message.text)
        case "token_ids":
            logprobs = tuple(
                TokenLogprobs(each.logprob, tuple(each.top_ids), tuple(each.top_logprobs)) for each in message.logprobs
            )
            return Tokens(message.name, tuple(message.token_ids.ids), logprobs)
        case "audio":
            return _audio(message.name, message.audio)
        case "image":
            return Image(message.name, message.image.data, message.image.media_type)
        case "tensor":
            return TensorOutput(message.name, message.tensor.name, read_inline(message.tensor))
        case None:
            return None


def _audio(output: str, message: request_pb2.Audio) -> AudioChunk:
    samples = read_inline(message.samples)
    if samples.dtype != np.float32 or samples.ndim not in (1, 2) or message.sample_rate_hz < 1:
        raise InvalidChunkError(
            f"output {output!r} is {samples.dtype}{list(samples.shape)} at {message.sample_rate_hz} Hz; audio is "
            "float32[samples] or float32[samples, channels] at 1 Hz or more; fix the stage that makes it"
        )
    return AudioChunk(output, samples.view(np.float32), message.sample_rate_hz)


def _report(message: stage_pb2.StepFinished) -> StageReport:
    usage = message.usage
    edges = tuple(EdgeUsage(edge.edge, edge.connector, edge.chunks, edge.size_bytes) for edge in message.edges)
    return StageReport(Usage(usage.prompt_tokens, usage.output_tokens, usage.steps), _timings(message.timings), edges)


def _timings(message: request_pb2.Timings) -> Timings:
    first_s = message.first_output_s if message.HasField("first_output_s") else None
    return Timings(message.started_s, first_s, message.finished_s)
