"""Decisions about parameters: every one of OpenAI's and of vLLM's API with null, its default and another value."""

import ast
import base64
import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import openai
import pytest
from openai import NOT_GIVEN
from openai.types import (
    AudioModel,
    completion_create_params,
    image_edit_params,
    image_generate_params,
    video_create_params,
)
from openai.types.audio import SpeechModel, speech_create_params, transcription_create_params
from openai.types.chat import (
    ChatCompletionContentPartImageParam,
    ChatCompletionMessage,
    ChatCompletionStreamOptionsParam,
    chat_completion_content_part_image_param,
)
from openai.types.chat import completion_create_params as chat_create_params
from prometheus_client import CollectorRegistry
from starlette.types import Message, Receive, Scope, Send

from stagemesh.common.errors import InvalidRequestError, OverloadedError
from stagemesh.gateway.body import Body, StreamOptions, validate
from stagemesh.gateway.config import Aliases, GatewayConfig
from stagemesh.gateway.content import ImagePart, MessageBody, Url
from stagemesh.gateway.parameters import Policy
from stagemesh.gateway.routes.chat import ChatBody
from stagemesh.gateway.routes.completions import CompletionBody
from stagemesh.gateway.routes.images import ImageBody
from stagemesh.gateway.routes.speech import SpeechBody
from stagemesh.gateway.routes.transcriptions import TranscriptionBody
from stagemesh.gateway.routes.videos import VideoBody
from stagemesh.gateway.routes.voices import CreateVoiceBody
from stagemesh.v1.orchestrator_pb2 import GenerateResponse
from stagemesh.v1.request_pb2 import Media, Output, TokenLogprob, TokenLogprobs
from stagemesh.v1.signature_pb2 import OptionSpec, Signature
from tests.client.scripted import admitted, audio, called, ended, finished, served, text
from tests.gateway.making import ask, asking, describe
from tests.repository.commands import ROOT

PROMPT = {"model": "p", "prompt": "x"}
USER = {"role": "user", "content": "hi"}
LEAST: Mapping[type[Body], Mapping[str, Any]] = {
    ChatBody: {"model": "p", "messages": [USER]},
    CompletionBody: PROMPT,
    SpeechBody: {"model": "p", "input": "x"},
    TranscriptionBody: {"model": "p"},
    ImageBody: PROMPT,
    VideoBody: PROMPT,
    MessageBody: USER,
    ImagePart: {"type": "image_url", "image_url": {"url": "data:"}},
    Url: {"url": "data:"},
    StreamOptions: {},
}
"""The parameters that a body needs."""
OPENAI: tuple[tuple[type[Body], Any, str, str], ...] = (
    (
        ChatBody,
        chat_create_params.CompletionCreateParamsBase,
        """metadata moderation prediction prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort
        safety_identifier service_tier store verbosity""",
        "function_call functions logit_bias web_search_options",
    ),
    (CompletionBody, completion_create_params.CompletionCreateParamsBase, "", "best_of logit_bias suffix"),
    (SpeechBody, speech_create_params.SpeechCreateParams, "", ""),
    (
        TranscriptionBody,
        transcription_create_params.TranscriptionCreateParamsBase,
        "chunking_strategy keywords languages",
        "include known_speaker_names known_speaker_references timestamp_granularities",
    ),
    (
        ImageBody,
        image_generate_params.ImageGenerateParamsBase,
        "complexity moderation output_compression quality safety_identifier style",
        "background frame_count frame_duration_ms svg",
    ),
    (
        ImageBody,
        image_edit_params.ImageEditParamsBase,
        "complexity input_fidelity output_compression quality safety_identifier",
        "background frame_count frame_duration_ms markup mask svg",
    ),
    (VideoBody, video_create_params.VideoCreateParams, "", "input_reference"),
    (ImagePart, ChatCompletionContentPartImageParam, "prompt_cache_breakpoint", ""),
    (Url, chat_completion_content_part_image_param.ImageURL, "detail", ""),
    (StreamOptions, ChatCompletionStreamOptionsParam, "include_obfuscation", ""),
    (MessageBody, ChatCompletionMessage, "", "function_call"),
)
"""For each body: OpenAI's schema, and its parameters that are ignored and refused. The gateway applies the others."""
FILES = {"file", "image"}


async def decided(body: type[Body], change: Mapping[str, Any], **settings: Any) -> str:
    """Returns the warnings about a change of a body. `settings` are settings of the gateway's config."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        validate(body, {**LEAST[body], **change})
        await send({"type": "http.response.start", "headers": []})

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def send(message: Message) -> None:
        headers.update(message["headers"])

    headers = dict[bytes, bytes]()
    config = GatewayConfig("127.0.0.1:0", [["127.0.0.1:1"]], **settings)
    await Policy(app, config, CollectorRegistry())({"type": "http"}, receive, send)
    return headers.get(b"stagemesh-warnings", b"").decode()


@pytest.mark.parametrize(
    ("body", "schema", "ignored", "refused"), OPENAI, ids=lambda value: getattr(value, "__name__", "")
)
async def test_each_parameter_of_openai_has_its_decision(
    body: type[Body], schema: Any, ignored: str, refused: str
) -> None:
    names = schema.__annotations__.keys() - FILES
    decisions = {name: body.decisions[name] for name in names - body.model_fields.keys()}
    effects = {name: rule.effect for name, rule in decisions.items() if rule.effect != "accepted"}
    assert effects == dict.fromkeys(ignored.split(), "ignored") | dict.fromkeys(refused.split(), "refused")
    for name in names - LEAST[body].keys():
        assert await decided(body, {name: None}, strict=True) == ""
    for name, rule in decisions.items():
        for value in rule.neutral:
            assert await decided(body, {name: value}, strict=True) == ""
        if rule.effect == "ignored" and name != "include_obfuscation":
            assert f"'{name}' is not supported and was ignored" in await decided(body, {name: ["other"]})
        elif rule.effect == "refused":
            with pytest.raises(InvalidRequestError, match=f"^{name}: it is not supported, and the answer would be"):
                await decided(body, {name: ["other"]})
        if rule.effect != "accepted" and name != "include_obfuscation":
            with pytest.raises(InvalidRequestError, match=f"^{name}: it is not supported"):
                await decided(body, {name: ["other"]}, strict=True)


@pytest.mark.parametrize(("body", "module"), [(ChatBody, "chat_completion"), (CompletionBody, "completion")])
def test_each_parameter_of_vllm_has_a_decision(body: type[Body], module: str) -> None:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    tree = ast.parse((Path(found.origin).parent / f"entrypoints/openai/{module}/protocol.py").read_text())
    (request,) = (
        each
        for each in tree.body
        if isinstance(each, ast.ClassDef) and each.name in {"ChatCompletionRequest", "CompletionRequest"}
    )
    names = {
        each.target.id for each in request.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    assert len(names) > 50
    known = body.model_fields.keys() | body.decisions.keys()
    assert {name for name in names if not name.startswith("_")} <= known


OMNI: tuple[tuple[type[Body], str, str, str], ...] = (
    (
        ChatBody,
        "modalities mm_processor_kwargs",
        "request_id",
        """audios extra_args extra_body extra_params guidance_scale height image_generation images lora negative_prompt
        num_frames num_inference_steps num_outputs_per_prompt sampling_params_list size speaker stage_params
        stage_sampling talker_max_new_tokens talker_repetition_penalty talker_temperature talker_top_k talker_top_p
        true_cfg_scale video_fps video_max_frames video_max_pixels video_min_pixels video_total_pixels videos width""",
    ),
    (
        SpeechBody,
        """language max_new_tokens non_streaming_mode ref_audio ref_text repetition_penalty speaker stream temperature
        top_k top_p x_vector_only_mode""",
        "initial_codec_chunk_frames task_type",
        """ambient_sound duration_seconds duration_tokens extra_params ref_audio_2 references sample_rate
        speaker_embedding stage_params token_count word_timestamps""",
    ),
    (CreateVoiceBody, "ref_text consent", "speaker_description", ""),
    (
        ImageBody,
        "guidance_scale negative_prompt num_inference_steps",
        "generator_device vae_use_slicing vae_use_tiling",
        """bot_task extra_params flow_shift infer_align_image_size layers lora mask_image reference_image resolution
        system_prompt true_cfg_scale url use_system_prompt""",
    ),
    (
        VideoBody,
        "guidance_scale negative_prompt num_frames num_inference_steps",
        "",
        """boundary_ratio enable_frame_interpolation extra_params flow_shift fps frame_interpolation_exp
        frame_interpolation_model_path frame_interpolation_scale generate_sound guidance_scale_2 height image_reference
        lora sound_duration true_cfg_scale video_params width""",
    ),
)
"""For each body: the parameters of vLLM-Omni and SGLang-Omni that are applied, ignored and refused."""


@pytest.mark.parametrize(
    ("body", "applied", "ignored", "refused"), OMNI, ids=lambda value: getattr(value, "__name__", "")
)
def test_each_parameter_of_other_omni_servers_has_its_decision(
    body: type[Body], applied: str, ignored: str, refused: str
) -> None:
    assert {*applied.split()} <= body.model_fields.keys()
    effects = {name: body.decisions[name].effect for name in f"{ignored} {refused}".split()}
    assert effects == dict.fromkeys(ignored.split(), "ignored") | dict.fromkeys(refused.split(), "refused")
    page = (ROOT / "docs/migration.md").read_text()
    assert [name for name in f"{applied} {ignored} {refused}".split() if f"`{name}`" not in page] == []


TTS = Signature(
    options=[OptionSpec(name="speaker"), OptionSpec(name="reference_text"), OptionSpec(name="whole_text")],
    sampling=True,
    media=True,
)


async def test_a_speech_of_another_omni_server_is_applied() -> None:
    sent: Any = {"speaker": "vivian", "ref_text": "hi", "x_vector_only_mode": True, "non_streaming_mode": True}
    sent |= {"stream": True, "max_new_tokens": 9, "temperature": 0.5, "task_type": "CustomVoice"}
    async with served() as orchestrator, asking(orchestrator) as ai:
        describe(orchestrator, "audio", signature=TTS)
        orchestrator.scripts.append([admitted(), audio([0.5] * 2400), ended("audio"), finished()])
        create: Any = ai.audio.speech.with_raw_response.create
        made = await create(model="p", voice=NOT_GIVEN, input="x", extra_body=sent)
        assert made.headers["content-type"].startswith("text/event-stream")
        assert made.headers["stagemesh-warnings"] == "'task_type' is not supported and was ignored"
        given = orchestrator.requests[0].parameters
        options = {name: value.text or value.flag for name, value in given.options.items()}
        assert options == {"speaker": "vivian", "whole_text": True}
        assert (given.sampling.max_tokens, given.sampling.temperature) == (9, 0.5)
    async with served() as orchestrator, asking(orchestrator) as ai:
        describe(orchestrator, "audio")
        orchestrator.scripts.append([admitted(), audio([0.5] * 2400), ended("audio"), finished()])
        made = await ai.audio.speech.with_raw_response.create(
            model="p", voice="default", input="x", extra_body={"top_k": 3}
        )
        assert "'top_k' has no effect" in made.headers["stagemesh-warnings"]


async def test_an_image_has_the_warnings_of_stages_and_a_checked_format() -> None:
    image = GenerateResponse(output=Output(name="image", image=Media(media_type="image/png", data=b"x", last=True)))
    end = finished()
    end.finished.choices[0].stages["thinker"].warnings.add(reason="SIZE_ROUNDED", message="rounded to 8x8")
    async with served() as orchestrator, asking(orchestrator, strict=True) as ai:
        describe(orchestrator, "image")
        orchestrator.scripts.append([admitted(), image, ended("image"), end])
        made = await ai.images.with_raw_response.generate(model="p", prompt="x", output_format="png")
        assert made.headers["stagemesh-warnings"] == "rounded to 8x8"
        assert made.http_response.json()["warnings"] == ["rounded to 8x8"]
        assert not orchestrator.requests[0].input.empty_negative_prompt
        with pytest.raises(openai.BadRequestError, match="has the option output_format") as caught:
            await ai.images.generate(model="p", prompt="x", output_format="jpeg")
        assert caught.value.param == "output_format"
        assert len(orchestrator.requests) == 1
        await ai.images.generate(model="p", prompt="x", extra_body={"negative_prompt": ""})
        assert orchestrator.requests[1].input.empty_negative_prompt


async def test_a_chat_of_another_omni_server_is_applied() -> None:
    video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    async with served() as orchestrator, asking(orchestrator) as ai:
        describe(orchestrator, "text", "audio")
        orchestrator.scripts.append([admitted(), audio([0.5] * 2400), ended("audio"), ended(), finished()])
        answer = await ask(
            ai,
            messages=[{"role": "user", "content": [video]}],
            modalities=["audio"],
            extra_body={"mm_processor_kwargs": {"use_audio_in_video": True}},
        )
        assert base64.b64decode(answer.choices[0].message.audio.data).startswith(b"RIFF")
        assert orchestrator.requests[0].input.conversation.messages[0].parts[0].use_audio_in_video


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temprature": 1}, "temprature: this parameter is unknown (did you mean temperature?)"),
        ({"temprature": None}, "temprature: this parameter is unknown (did you mean temperature?)"),
        ({"zzz": 1}, "zzz: this parameter is unknown"),
        ({"messages": [{**USER, "rol": 1}]}, "messages.0.rol: this parameter is unknown (did you mean role?)"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content: input should be a text or a list of parts",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text: field required"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 1}}]}]},
            "messages.0.content.0.image_url.url: input should be a valid string",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "file"}]}]},
            "messages.0.content.0: input tag 'file' found using 'type' does not match any of the expected tags",
        ),
        ({"tool_choice": "always"}, "tool_choice: input should be 'auto', 'none' or 'required'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function: field required"),
        ({"stop": {"a": 1}}, "stop: input should be a text or a list of texts"),
        ({"stop": ["a", 1]}, "stop.1: input should be a valid string"),
        ({"options": {"a": []}}, "options.a: input should be a text, a number or a flag"),
        ({"x" * 5_000_000: 1}, f"{'x' * 100}: this parameter is unknown"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
async def test_a_mistake_is_named_by_the_type_that_was_meant(change: Mapping[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await decided(ChatBody, change)
    assert caught.value.message.partition(": 'text'")[0] == message


async def test_unknown_parameters_can_be_warnings() -> None:
    unknown = {"temprature": 1, "\r\nX: é": 1}
    warnings = await decided(ChatBody, unknown, unknown_parameters="warn")
    assert warnings.startswith(
        "'temprature' is unknown (did you mean temperature?) and was ignored; '\\r\\nX: \\xe9' is"
    )
    with pytest.raises(InvalidRequestError, match="temprature"):
        await decided(ChatBody, unknown, unknown_parameters="warn", strict=True)
    many = {f"{number}{'k' * 90}": 1 for number in range(900)}
    assert len(await decided(ChatBody, many, unknown_parameters="warn")) <= 1024


async def test_warnings_reach_the_caller_the_log_and_the_metrics(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append([admitted(), text("hello"), ended(), finished()])
        create: Any = ai.chat.completions.with_raw_response.create
        with caplog.at_level(logging.WARNING, "stagemesh.gateway.parameters"):
            for stream in (False, True):
                raw = await create(
                    model="p",
                    messages=[{"role": "user", "content": "hi", "name": "ada", "cache_control": {}}],
                    stream=stream,
                    seed=1,
                    store=True,
                )
                header = raw.headers["stagemesh-warnings"]
                assert (
                    header
                    == "'store' is not supported and was ignored; 'cache_control' is not supported and was ignored"
                )
                assert orchestrator.requests[-1].input.conversation.messages[0].name == "ada"
                if not stream:
                    assert "; ".join(raw.parse().model_extra["warnings"]) == header
        assert len(caplog.records) == 2
        plain = await ask(ai)
        assert plain.model_extra == {}


LOOK = Signature(options=[OptionSpec(name="speaker", allowed_texts=["alto"])])


async def test_voices_and_models_of_openai_have_defaults() -> None:
    aliases = Aliases(models={"gpt-4o": "p"}, voices={"nova": "alto"})
    async with served() as orchestrator, asking(orchestrator, aliases=aliases) as ai:
        describe(orchestrator, "text", "audio", signature=LOOK)
        orchestrator.scripts.append([admitted(), audio([0.5] * 2400), ended("audio"), finished()])
        create: Any = ai.audio.speech.with_raw_response.create
        for voice, speaker in (("ash", None), ("nova", "alto"), ("alto", "alto"), ({"id": "alto"}, "alto")):
            made = await create(model="tts-1", voice=voice, input="hi", speed=1.0, instructions="calm")
            header = made.headers["stagemesh-warnings"]
            assert ("'instructions' is" in header, "'voice' is" in header) == (True, speaker is None)
            options = orchestrator.requests[-1].parameters.options
            assert {name: value.text for name, value in options.items()} == ({"speaker": speaker} if speaker else {})
        for wrong in ({"speed": 1.5}, {"voice": "tenor"}, {"model": "tts-2"}):
            with pytest.raises(openai.APIStatusError):
                await create(**{"model": "tts-1", "voice": "alto", "input": "hi", **wrong})
        orchestrator.scripts[0] = [admitted(), text("hello"), ended(), finished()]
        assert (await ask(ai, model="gpt-4o")).model == "gpt-4o"
        with pytest.raises(openai.NotFoundError):
            await ask(ai, model="whisper-1")


async def test_every_audio_model_of_openai_is_the_pipeline_that_can_replace_it() -> None:
    async with served() as orchestrator, asking(orchestrator) as ai:
        describe(orchestrator, "text", "audio", signature=Signature(media=True))
        orchestrator.scripts.append([admitted(), ended(), finished()])
        for model in (*get_args(AudioModel), *get_args(SpeechModel)):
            assert (await ask(ai, model=model)).model == model


TOOL = {"type": "function", "function": {"name": "find"}}
ECHOES: Mapping[str, tuple[GenerateResponse, Mapping[str, Any]]] = {
    "text": (text("hello"), {}),
    "call": (called("find", "{}"), {"tools": [TOOL]}),
    "speech": (text("hello"), {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ECHOES)
async def test_an_answer_is_accepted_as_it_was_sent(kind: str, stream: bool) -> None:
    made, arguments = ECHOES[kind]
    async with served() as orchestrator, asking(orchestrator, strict=True) as ai:
        describe(orchestrator, "text", "audio")
        spoken = [audio([0.5] * 240), ended("audio")] if kind == "speech" else []
        orchestrator.scripts += [[admitted(), made, *spoken, ended(), finished()], [admitted(), ended(), finished()]]
        answer = await ask(ai, stream=stream, **arguments)
        if stream:
            message: dict[str, Any] = {"content": "", "audio": {}}
            async for chunk in answer:
                for choice in chunk.choices:
                    delta = choice.delta.model_dump(exclude_none=True)
                    message["audio"] |= delta.pop("audio", {})
                    message |= {**delta, "content": message["content"] + delta.get("content", "")}
            message["audio"] = message["audio"] or None
        else:
            message = answer.choices[0].message.model_dump()
        sent = {**message, "parsed": None, "reasoning_content": "so"}
        # @openai/agents sends the fields of a message within its text.
        part = {"type": "text", "text": message.pop("content") or "", **message}
        within = {"role": "assistant", "content": [part]}
        await ask(ai, messages=[USER, sent, {"role": "tool", "tool_call_id": "1", "content": "far"}, within])
        echoed = orchestrator.requests[-1].input.conversation.messages[1]
        assert echoed.content == ("" if kind == "call" else "hello")
        assert [call.name for call in echoed.tool_calls] == (["find"] if kind == "call" else [])


async def test_audio_without_its_transcript_is_ignored() -> None:
    message = {"role": "assistant", "audio": {"id": "audio_1"}}
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append([admitted(), ended(), finished()])
        assert "'audio' is not kept" in (await ask(ai, messages=[USER, message])).model_extra["warnings"][0]


async def test_a_prompt_may_be_a_list_with_one_list_of_token_ids() -> None:
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append([admitted(), ended(), finished()])
        await ai.completions.create(model="p", prompt=[[1, 2, 3]], n=1, best_of=1, echo=False)
        assert list(orchestrator.requests[0].input.token_ids.ids) == [1, 2, 3]


def scored(token: str, logprob: float, *, position: int, top: Mapping[str, float]) -> TokenLogprobs:
    best = [TokenLogprob(text=text, logprob=each) for text, each in top.items()]
    return TokenLogprobs(sampled=TokenLogprob(text=token, logprob=logprob), top=best, position=position)


@pytest.mark.parametrize(("most", "generated"), [(0, []), (2, ["ü", ""])])
async def test_a_completion_echoes_its_prompt(most: int, generated: list[str]) -> None:
    end = finished()
    end.finished.choices[0].stages["thinker"].prompt_logprobs.extend(
        [scored("hé", 0.0, position=0, top={}), scored("y", -0.5, position=3, top={"o": -0.25})]
    )
    made = text("ü")
    made.output.logprobs.append(scored("ü", -1.0, position=0, top={"ü": -1.0}))
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.description.outputs[0].stage = "thinker"
        orchestrator.scripts.append([admitted(), made, ended(), end])
        for prompt in ("héy", [7, 8]):
            answer = await ai.completions.create(model="p", prompt=prompt, echo=True, max_tokens=most, logprobs=1)
            (choice,) = answer.choices
            assert choice.logprobs is not None
            assert (choice.text, choice.logprobs.tokens) == ("".join(["héy", *generated]), ["hé", "y", *generated])
            assert choice.logprobs.token_logprobs == [None, -0.5, *[-1.0, None][: len(generated)]]
            assert choice.logprobs.top_logprobs == [None, {"o": -0.25}, *[{"ü": -1.0}, None][: len(generated)]]
            assert choice.logprobs.text_offset == [0, 2, *[3, 4][: len(generated)]]
            sampling = orchestrator.requests[-1].parameters.sampling
            assert (sampling.max_tokens, sampling.logprobs, sampling.prompt_logprobs) == (max(most, 1), 1, 1)
        create: Any = ai.completions.create
        many = {"prompt": [[5] * 5000] * 64, "echo": True, "logprobs": 1}
        contradictions = ({"echo": True, "stream": True}, {"echo": True, "n": 2}, {"max_tokens": 0})
        for wrong in (*contradictions, {"prompt": ["a", "b"], "n": 33}, many):
            with pytest.raises(openai.BadRequestError):
                await create(**{"model": "p", "prompt": "x", **wrong})


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (InvalidRequestError("too long", reason="PROMPT_TOO_LONG"), openai.BadRequestError, "context_length_exceeded"),
        (OverloadedError("full", reason="CALLER_LIMIT", retry_after_s=3), openai.RateLimitError, "rate_limit_exceeded"),
    ],
)
async def test_clients_know_the_codes_of_errors(error: Any, kind: type[openai.APIStatusError], code: str) -> None:
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append([error])
        with pytest.raises(kind) as caught:
            await ask(ai)
    assert caught.value.code == code
    assert caught.value.response.headers.get("retry-after") == ("3" if error.retry_after_s else None)
    assert caught.value.response.json()["error"]["reason"] == error.reason
