"""Requests that a stage rejects before it takes any resources."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stagemesh.common.errors import InvalidRequestError, UnsupportedError
from stagemesh.common.plugins.descriptors import OptionSpec, Signature
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.services.engines import prompts
from stagemesh.services.engines.abilities import EngineAbilities
from stagemesh.services.engines.base import SamplingOptions, Structure
from stagemesh.services.engines.prompts import ChatMessage, Conversation, RawPrompt, Tool, ToolCall
from stagemesh.services.stage.step.checks import check_spec
from stagemesh.services.stage.step.spec import spec_from_wire
from stagemesh.v1 import chunk_pb2, request_pb2, stage_pb2, tensor_pb2
from stagemesh.v1.request_pb2 import MediaFile
from tests.rpc.call_errors import raises
from tests.stage.replicas import step_request

Request = stage_pb2.ExecuteStepRequest
Change = Callable[[Request], object]

TEXT = TensorSpec("uint8", ("bytes",))
SOURCE = Signature(emits={}, sampling=True, options={"speed": OptionSpec(1.0, minimum=0.5, maximum=2.0)})
SEEING = replace(SOURCE, media=True)
BOUND = stage_pb2.OutputBinding(
    edge="a->b", consumer="b-0", endpoint="127.0.0.1:1", connector=chunk_pb2.CONNECTOR_AUTO, attempt=1
)

ENDLESS = request_pb2.Sampling(ignore_eos=True, grammar='start: "a"')
REVERSED = request_pb2.Sampling(min_tokens=9, max_tokens=8)


def _request() -> Request:
    """Returns the request of a step without streamed outputs."""
    request = step_request()
    request.ClearField("streamed")
    return request


def _check(request: Request, signature: Signature = SOURCE, **abilities: Any) -> None:
    check_spec(spec_from_wire(request), signature, engine="fake", abilities=EngineAbilities(**abilities))


def _option(name: str, number: float) -> Change:
    return lambda request: setattr(request.parameters.options[name], "number", number)


def _tensor(**fields: object) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(name="x", dtype=tensor_pb2.DATA_TYPE_UINT8, shape=[1], **fields)  # type: ignore[arg-type]


def _part(**content: object) -> Change:
    """Returns a change that makes the prompt a message of this one part."""

    def change(request: Request) -> None:
        part = request_pb2.Part(**content)  # type: ignore[arg-type]
        request.input.conversation.messages.add(role=request_pb2.ROLE_USER, parts=[part])

    return change


def _audio(
    rate_hz: int, *, dtype: tensor_pb2.DataType.ValueType = tensor_pb2.DATA_TYPE_FLOAT32, samples: int = 2
) -> Change:
    tensor = tensor_pb2.Tensor(dtype=dtype, shape=[samples], inline=bytes(4 * samples))
    return _part(audio=request_pb2.Audio(samples=tensor, sample_rate_hz=rate_hz))


@pytest.mark.parametrize(
    ("change", "reason", "message"),
    [
        (lambda r: setattr(r, "request_id", "a b"), "INVALID_ID", "letters, digits"),
        (lambda r: setattr(r, "request_id", "x" * 129), "INVALID_ID", "1 to 128"),
        (lambda r: setattr(r, "step_id", "x\n"), "INVALID_ID", "step_id is"),
        (lambda r: setattr(r.input, "text", " \n"), "EMPTY_PROMPT", "the prompt is empty"),
        (lambda r: r.ClearField("input"), "EMPTY_PROMPT", "the prompt is empty"),
        (lambda r: r.input.conversation.SetInParent(), "EMPTY_PROMPT", "the prompt is empty"),
        (lambda r: r.input.token_ids.SetInParent(), "EMPTY_PROMPT", "the prompt is empty"),
        (lambda r: r.input.conversation.messages.add(role=9), "INVALID_PROMPT", "ROLE_SYSTEM, ROLE_DEV"),
        (_option("speed", 3.0), "INVALID_OPTION", "must be a number from 0.5 to 2"),
        (_option("speed", float("nan")), "INVALID_OPTION", "'speed' is nan"),
        (lambda r: setattr(r.parameters.sampling, "max_tokens", 0), "INVALID_SAMPLING", "max_tokens is 0"),
        (lambda r: setattr(r.parameters.sampling, "temperature", -1), "INVALID_SAMPLING", "at least 0"),
        (lambda r: setattr(r.parameters.sampling, "temperature", float("inf")), "INVALID_SAMPLING", "is inf"),
        (lambda r: setattr(r.parameters.sampling, "top_p", 0), "INVALID_SAMPLING", "over 0 and at most 1"),
        (lambda r: setattr(r.parameters.sampling, "repetition_penalty", 0), "INVALID_SAMPLING", "over 0"),
        (lambda r: r.parameters.sampling.stop.append(""), "INVALID_SAMPLING", "stop text is empty"),
        (lambda r: setattr(r.parameters.sampling, "min_p", 1.5), "INVALID_SAMPLING", "from 0 to 1"),
        (lambda r: setattr(r.parameters.sampling, "presence_penalty", -3), "INVALID_SAMPLING", "from -2 to 2"),
        (lambda r: setattr(r.parameters.sampling, "frequency_penalty", float("nan")), "INVALID_SAMPLING", "is nan"),
        (lambda r: r.parameters.sampling.bad_words.append(" "), "INVALID_SAMPLING", "an entry of bad_words is empty"),
        (lambda r: r.parameters.sampling.MergeFrom(REVERSED), "INVALID_SAMPLING", "min_tokens is 9 but max_tok"),
        (lambda r: setattr(r.parameters.sampling, "regex", ""), "INVALID_SAMPLING", "regex is empty"),
        (lambda r: r.parameters.sampling.allowed_texts.SetInParent(), "INVALID_SAMPLING", "allowed_texts has no text"),
        (lambda r: r.parameters.sampling.MergeFrom(ENDLESS), "INVALID_SAMPLING", "ignore_eos contradicts grammar"),
        (lambda r: r.inputs.add(edge="a->b", attempt=1, producer="a-0"), "INVALID_EDGE", "unbind a->b"),
        (lambda r: r.outputs.extend([BOUND, BOUND]), "INVALID_EDGE", "'a->b' twice"),
        (lambda r: r.outputs.add(edge="a->b", connector=77), "UNKNOWN_CONNECTOR", "connector 77"),
        (lambda r: r.outputs.add(edge="a->b", connector=1, tokens=9), "INVALID_EDGE", "a->b carries token selection 9"),
        (lambda r: _policy(r).frames.SetInParent(), "INVALID_EDGE", "frames >= 1"),
        (lambda r: r.input.tensors.extend([_tensor(inline=b"1")] * 2), "INVALID_REQUEST", "'x' twice"),
        (lambda r: r.input.tensors.append(_tensor(shm=tensor_pb2.ShmRegion())), "INVALID_CHUNK", "inline"),
        (lambda r: r.input.tensors.append(_tensor(inline=b"12")), "INVALID_CHUNK", "needs 1 bytes but has 2"),
        (_part(), "INVALID_PROMPT", "a part without content"),
        (_part(image=MediaFile(media_type="image/png")), "INVALID_MEDIA", "image has no data"),
        (_audio(999), "INVALID_MEDIA", "audio is at 999 Hz; it must be at 1000 to 384000 Hz"),
        (_audio(8_000, samples=0), "INVALID_MEDIA", "must not be empty"),
        (_audio(8_000, dtype=tensor_pb2.DATA_TYPE_INT32), "INVALID_MEDIA", "audio is int32"),
    ],
)
def test_a_bad_request_is_rejected_with_a_remedy(change: Change, reason: str, message: str) -> None:
    request = _request()
    change(request)
    with raises(InvalidRequestError, reason=reason, match=message):
        _check(request, SEEING)


def test_content_and_parts_exclude_each_other() -> None:
    request = step_request()
    request.input.conversation.messages.add(role=request_pb2.ROLE_USER, content="a", parts=[request_pb2.Part(text="b")])
    with pytest.raises(InvalidRequestError, match="content and parts"):
        spec_from_wire(request)


def test_media_are_rejected_by_a_text_engine() -> None:
    request = _request()
    _audio(8_000)(request)
    _check(request, SEEING)
    with pytest.raises(UnsupportedError, match="engine fake accepts only text on this stage; omit the audio"):
        _check(request)


def test_a_stage_without_its_edge_is_rejected() -> None:
    fed = Signature(accepts={"frames": TensorSpec.parse("float32[frames]")})
    with raises(InvalidRequestError, reason="MISSING_INPUT", match="bind an edge that carries frames"):
        _check(_request(), fed)


def test_a_prompt_replaces_the_edge_of_a_stage_that_needs_text_alone() -> None:
    _check(_request(), Signature(accepts={"text": TEXT}))


@pytest.mark.parametrize("resumable", [True, False])
def test_max_steps_is_rejected_by_an_engine_that_cannot_pause(*, resumable: bool) -> None:
    request = step_request()
    request.max_engine_steps = 1
    with pytest.raises(UnsupportedError, match="engine fake cannot pause; leave max_engine_steps unset"):
        _check(request, can_resume=resumable)


def test_a_checkpoint_of_another_stage_is_rejected() -> None:
    request = _request()
    request.resume_from.outputs["audio"] = 3
    with raises(InvalidRequestError, reason="INVALID_CHECKPOINT", match="the checkpoint counts 'audio'"):
        _check(request, can_resume=True)


def test_a_valid_request_is_converted_completely() -> None:
    request = _request()
    request.parameters.sampling.MergeFrom(request_pb2.Sampling(max_tokens=3, temperature=0, stop=["."]))
    request.parameters.options["speed"].number = 2.0
    request.outputs.append(BOUND)
    spec = spec_from_wire(request)
    check_spec(spec, SOURCE, engine="fake", abilities=EngineAbilities())
    assert (spec.task.prompt, spec.task.seed, spec.task.options) == ("hi", 1, {"speed": 2.0})
    assert (spec.task.sampling.max_tokens, spec.task.sampling.temperature, spec.task.sampling.top_p) == (3, 0, None)


def test_a_conversation_is_converted_with_its_tools() -> None:
    request = step_request()
    conversation = request.input.conversation
    conversation.messages.add(role=request_pb2.ROLE_DEVELOPER, content="be brief", name="ada")
    for city in ("Bern", "Rom"):
        made = request_pb2.ToolCall(id="c1", name="weather", arguments=f'{{"city": "{city}"}}')
        conversation.messages.add(role=request_pb2.ROLE_ASSISTANT, tool_calls=[made])
        conversation.messages.add(role=request_pb2.ROLE_TOOL, content="12", tool_call_id="c1")
    conversation.tools.add(name="weather", description="d", parameters='{"type": "object"}')
    conversation.template_arguments = '{"thinking": false}'
    calls = [ToolCall("c1", "weather", {"city": city}) for city in ("Bern", "Rom")]
    assert spec_from_wire(request).task.prompt == Conversation(
        (
            ChatMessage("developer", "be brief", name="ada"),
            ChatMessage("assistant", tool_calls=(calls[0],)),
            ChatMessage("tool", "12", result_of=calls[0]),
            ChatMessage("assistant", tool_calls=(calls[1],)),
            ChatMessage("tool", "12", result_of=calls[1]),
        ),
        (Tool("weather", "d", {"type": "object"}),),
        {"thinking": False},
    )


def test_media_of_a_raw_prompt_are_converted() -> None:
    request = step_request()
    video = MediaFile(data=b"x", media_type="video/mp4")
    request.input.media.add(video_file=video, use_audio_in_video=True)
    media = (prompts.MediaFile("video", b"x", "video/mp4", use_audio=True),)
    request.input.raw_text = "<video>"
    assert spec_from_wire(request).task.prompt == RawPrompt("<video>", media)
    request.input.token_ids.ids.extend([5, 6])
    assert spec_from_wire(request).task.prompt == RawPrompt((5, 6), media)


def test_every_sampling_field_is_converted() -> None:
    request = step_request()
    sampling = request_pb2.Sampling(
        max_tokens=9,
        temperature=0.5,
        top_p=0.25,
        top_k=4,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        stop=["end"],
        stop_token_ids=[3],
        min_tokens=2,
        ignore_eos=True,
        bad_words=["bad"],
        logprobs=0,
    )
    request.parameters.sampling.CopyFrom(sampling)
    options = spec_from_wire(request).task.sampling
    sent = {field.name: value for field, value in sampling.ListFields()}
    assert {name: getattr(options, name) for name in sent} == {
        name: tuple(value) if name in {"stop", "stop_token_ids", "bad_words"} else value for name, value in sent.items()
    }
    assert spec_from_wire(step_request()).task.sampling == SamplingOptions()
    allowed_texts = request_pb2.AllowedTexts(texts=["yes", "no"])
    request.parameters.sampling.CopyFrom(request_pb2.Sampling(allowed_texts=allowed_texts))
    assert spec_from_wire(request).task.sampling == SamplingOptions(structure=Structure("allowed_texts", ("yes", "no")))


def _policy(request: Request) -> stage_pb2.ChunkPolicy:
    return request.outputs.add(
        edge="a->b", attempt=1, consumer="b", endpoint="h:1", connector=chunk_pb2.CONNECTOR_SHM
    ).policy


def test_what_orchestrators_measure_and_negotiate_does_not_distinguish_steps() -> None:
    request = step_request()
    request.outputs.append(BOUND)
    request.outputs[0].policy.frames.frames = 4
    first = spec_from_wire(request)
    request.traceparent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    request.outputs[0].connector = chunk_pb2.CONNECTOR_GRPC
    request.outputs[0].policy.frames.pace.frame_interval_s = 0.5
    request.outputs[0].policy.frames.pace.frame_audio_s = 0.08
    request.outputs[0].policy.frames.pace.call_costs.add(frames=4, seconds=0.01)
    assert spec_from_wire(request).fingerprint == first.fingerprint
    assert request.outputs[0].policy.frames.pace.frame_interval_s == 0.5
    request.outputs[0].policy.frames.frames = 5
    assert spec_from_wire(request).fingerprint != first.fingerprint
