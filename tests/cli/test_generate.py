import json
import wave
from collections import deque
from pathlib import Path

import pytest

from stagemesh.common.errors import ExitCode, OverloadedError, UnavailableError
from stagemesh.v1 import request_pb2
from stagemesh.v1.orchestrator_pb2 import GenerateRequest
from stagemesh.v1.orchestrator_pb2 import GenerateResponse as Response
from stagemesh.v1.request_pb2 import Media
from tests.cli.commands import Ran, stagemesh
from tests.client.scripted import Script, ScriptedOrchestrator, admitted, audio, ended, finished, queued, text


async def _generate(
    orchestrator: ScriptedOrchestrator, *arguments: str, parts: Script = (), stdin: str = "", code: int = 0
) -> Ran:
    """Runs `stagemesh generate` against an orchestrator that sends these parts between the first and last events.

    Asserts that the command ends with the status `code`.
    """
    orchestrator.scripts = deque([[admitted(), *parts, finished()]])
    ran = await stagemesh("generate", *arguments, "--server", orchestrator.endpoint, stdin=stdin)
    assert ran.exit_code == code, ran.stderr
    return ran


async def test_text_goes_to_stdout_and_the_rest_to_stderr(orchestrator: ScriptedOrchestrator) -> None:
    ran = await _generate(orchestrator, "hello", parts=[text("Hi "), text("you"), audio([0.0] * 240)])
    assert (ran.exit_code, ran.stdout) == (0, "Hi you\n")
    assert all(part in ran.stderr for part in ("time to first text", "real-time factor", "thinker->vocoder", "shm"))


async def test_audio_is_written_to_the_file(orchestrator: ScriptedOrchestrator, tmp_path: Path) -> None:
    path = str(tmp_path / "out" / "a.wav")
    await _generate(orchestrator, "hello", "--audio", path, parts=[audio([0.0] * 10), audio([0.5] * 5)])
    with wave.open(str(tmp_path / "out" / "a.wav")) as file:
        assert (file.getnframes(), file.getframerate()) == (15, 24000)


async def test_encoded_media_are_written_as_they_are(orchestrator: ScriptedOrchestrator, tmp_path: Path) -> None:
    names = {"song": "audio/ogg", "film": "video/mp4", "clip": "video/webm"}
    parts = [
        Response(output=request_pb2.Output(name=name, position=at, media=Media(media_type=each, data=data, offset=at)))
        for name, each in names.items()
        for at, data in ((0, b"ab"), (2, b"c"))
    ]
    arguments = ["--output", str(tmp_path), "--audio", str(tmp_path / "a.ogg"), "--image", str(tmp_path / "new" / "v")]
    await _generate(orchestrator, "hello", *arguments, parts=parts)
    for name in ("a.ogg", "new/v", "clip.webm"):
        assert (tmp_path / name).read_bytes() == b"abc"
    assert not (tmp_path / "song.ogg").exists()


async def test_a_stored_output_is_named(orchestrator: ScriptedOrchestrator) -> None:
    file = request_pb2.MediaFile(uri="s3://b/a.mp4", media_type="video/mp4", size_bytes=7, sha256=b"\x0f" * 32)
    ran = await _generate(orchestrator, "hello", parts=[Response(output=request_pb2.Output(name="film", file=file))])
    assert f"stored s3://b/a.mp4 (video/mp4, 7 bytes, SHA-256 {'0f' * 32})" in ran.stderr


async def test_a_folder_receives_every_output(orchestrator: ScriptedOrchestrator, tmp_path: Path) -> None:
    await _generate(orchestrator, "hello", "--output", str(tmp_path), parts=[audio([0.0])])
    assert (tmp_path / "audio.wav").exists()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_choices_are_printed_and_files_numbered(orchestrator: ScriptedOrchestrator, tmp_path: Path) -> None:
    parts = [text("a", index=1), text("b"), text("c", index=1), audio([0.0], index=1), audio([0.0, 0.0])]
    orchestrator.scripts.append([admitted(choices=2), *parts, ended(index=1), text("d\n"), ended(), finished(2)])
    arguments = ["generate", "hello", "--server", orchestrator.endpoint, "--choices", "2", "--output", str(tmp_path)]
    ran = await stagemesh(*arguments, "--image", str(tmp_path / "x.png"))
    assert (ran.exit_code, ran.stdout) == (0, "choice 1:\nac\nchoice 0:\nbd\n")
    assert _names(tmp_path) == ["audio.0.wav", "audio.1.wav"]
    assert orchestrator.requests[0].parameters.choices == 2
    await stagemesh(*arguments, "--audio", str(tmp_path / "mine.wav"))
    assert _names(tmp_path) == ["audio.0.wav", "audio.1.wav", "mine.0.wav", "mine.1.wav"]
    document = json.loads((await stagemesh(*arguments, "--json")).stdout)
    assert document["texts"] == {"text": "bd\n"}
    assert [(choice["seed"], choice["texts"]["text"]) for choice in document["choices"]] == [(7, "bd\n"), (8, "ac")]
    assert [choice["files"]["audio"][0][-5:] for choice in document["choices"]] == ["0.wav", "1.wav"]


async def test_options_reach_the_server(orchestrator: ScriptedOrchestrator) -> None:
    arguments = ["--outputs", "text,audio", "--max-tokens", "9", "--seed", "0", "--option", "speed=1.5"]
    await _generate(orchestrator, "-", *arguments, stdin="from stdin")
    request = orchestrator.requests[0]
    assert (request.input.text, list(request.outputs)) == ("from stdin", ["text", "audio"])
    assert (request.parameters.sampling.max_tokens, request.parameters.options["speed"].number) == (9, 1.5)


async def test_what_is_not_given_is_not_sent(orchestrator: ScriptedOrchestrator) -> None:
    await _generate(orchestrator, "hello")
    assert orchestrator.requests[0].parameters.sampling == request_pb2.Sampling()
    assert not orchestrator.requests[0].parameters.options


async def test_several_servers_are_tried_in_turn(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.scripts.append([admitted(), text("Hi"), finished()])
    ran = await stagemesh("generate", "hello", "--server", f"127.0.0.1:1, {orchestrator.endpoint}")
    assert (ran.exit_code, ran.stdout) == (0, "Hi\n")
    ran = await stagemesh("generate", "hello", "--server", ",", "--json")
    assert "it does not contain an address HOST:PORT" in json.loads(ran.stderr)["error"]["message"]


async def test_a_queued_request_prints_its_position(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.scripts.append([queued(3, expected_wait_s=4.4), admitted(), text("Hi"), finished()])
    ran = await stagemesh("generate", "hello", "--server", orchestrator.endpoint, "--caller", "me", "--priority", "2")
    assert (ran.stdout, ran.stderr.splitlines()[0]) == ("Hi\n", "queued: position 3, about 4 s")
    assert (orchestrator.requests[0].caller, orchestrator.requests[0].priority) == ("me", 2)
    silent = await stagemesh("generate", "hello", "--server", orchestrator.endpoint, "--json")
    assert "queued" not in silent.stderr


async def test_every_sampling_option_reaches_the_server(orchestrator: ScriptedOrchestrator) -> None:
    numbers = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.25, "top_k": 4, "min_p": 0.125, "min_tokens": 2}
    numbers |= {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "logprobs": 0}
    arguments = [text for name, value in numbers.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    arguments += ["--stop", "end", "--stop", "fin", "--stop-token", "3", "--bad-word", "bad", "--ignore-eos"]
    arguments += ["--allowed-text", "yes", "--allowed-text", "no", "--adapter", "style"]
    await _generate(orchestrator, "hello", *arguments)
    parameters = orchestrator.requests[0].parameters
    sampling = parameters.sampling
    assert {name: getattr(sampling, name) for name in numbers} == numbers
    assert (list(sampling.stop), list(sampling.allowed_texts.texts)) == (["end", "fin"], ["yes", "no"])
    assert (list(sampling.stop_token_ids), list(sampling.bad_words)) == ([3], ["bad"])
    assert (sampling.ignore_eos, parameters.adapter) == (True, "style")


async def test_options_and_parameters_of_a_stage_have_types(orchestrator: ScriptedOrchestrator) -> None:
    arguments = ["--option", "voice=alto", "--option", "steps=3", "--option", "echo=true", "--option", "speed=1.5"]
    own = ["talker.max_tokens=200", "talker.stop=end", "talker.regex=1", "talker.voice=bass", "talker.adapter=7"]
    own += ["talker.chunk=8", "vocoder.chunk=whole"]
    arguments += [text for each in own for text in ("--stage-parameter", each)]
    await _generate(orchestrator, "hello", *arguments)
    parameters = orchestrator.requests[0].parameters
    kinds = {name: value.WhichOneof("kind") for name, value in parameters.options.items()}
    assert kinds == {"voice": "text", "steps": "integer", "echo": "flag", "speed": "number"}
    talker = parameters.stages["talker"]
    assert talker.sampling == request_pb2.Sampling(max_tokens=200, stop=["end"], regex="1")
    assert (talker.options["voice"].text, talker.adapter) == ("bass", "7")
    assert (talker.chunk.initial_frames, parameters.stages["vocoder"].chunk.whole) == (8, True)


async def test_a_malformed_parameter_of_a_stage_is_a_usage_error(orchestrator: ScriptedOrchestrator) -> None:
    ran = await stagemesh("generate", "hi", "--server", orchestrator.endpoint, "--stage-parameter", "talker=3")
    assert (ran.exit_code, orchestrator.requests) == (2, [])
    assert "STAGE.KEY" in ran.stderr


async def test_structures_are_read_from_files(orchestrator: ScriptedOrchestrator, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("content")
    for option in ("--json-schema", "--grammar"):
        await _generate(orchestrator, "hello", option, str(tmp_path / "a"))
    sent = [request.parameters.sampling for request in orchestrator.requests]
    assert (sent[0].json_schema, sent[1].grammar) == ("content", "content")


async def test_attached_files_go_before_the_prompt(orchestrator: ScriptedOrchestrator, tmp_path: Path) -> None:
    for name in ("cat.png", "purr.wav", "cat.mp4"):
        (tmp_path / name).write_bytes(name.encode())
    arguments = [text for name in ("cat.png", "purr.wav", "cat.mp4") for text in ("--attach", str(tmp_path / name))]
    await _generate(orchestrator, "what?", *arguments)
    parts = orchestrator.requests[0].input.conversation.messages[0].parts
    assert [part.WhichOneof("content") for part in parts] == ["image", "audio_file", "video_file", "text"]
    assert (parts[1].audio_file.data, parts[3].text) == (b"purr.wav", "what?")


async def test_an_attachment_of_an_unknown_type_is_an_error(orchestrator: ScriptedOrchestrator, tmp_path: Path) -> None:
    ran = await stagemesh("generate", "hi", "--server", orchestrator.endpoint, "--attach", str(tmp_path / "cat.txt"))
    assert (ran.exit_code, orchestrator.requests) == (ExitCode.USAGE, [])
    assert "has none of the suffixes of images, audio and video" in ran.stderr


async def test_the_result_can_be_printed_as_json(orchestrator: ScriptedOrchestrator) -> None:
    document = json.loads((await _generate(orchestrator, "hello", "--json", parts=[text("Hi")])).stdout)
    assert (document["texts"], document["edges"][0]["connector"]) == ({"text": "Hi"}, "shm")


async def test_a_stage_that_ended_early_is_named(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.scripts.append([admitted(), text("Hi"), finished(talker=request_pb2.FINISH_REASON_LENGTH)])
    ran = await stagemesh("generate", "hello", "--server", orchestrator.endpoint)
    assert "stage talker ended early: length" in ran.stderr
    ran = await stagemesh("generate", "hello", "--server", orchestrator.endpoint, "--json")
    stages = json.loads(ran.stdout)["stages"]
    assert {name: stage["finish_reason"] for name, stage in stages.items()} == {"thinker": None, "talker": "length"}


async def test_a_named_file_without_an_output_is_reported(orchestrator: ScriptedOrchestrator, tmp_path: Path) -> None:
    ran = await _generate(orchestrator, "hello", "--audio", str(tmp_path / "a.wav"), parts=[text("Hi")])
    assert "a.wav was not written, because the request produced no output of this kind" in ran.stderr.replace("\n", "")


async def test_an_error_is_one_line_with_its_remedy(orchestrator: ScriptedOrchestrator) -> None:
    full = OverloadedError("64 requests are in flight", retry_after_s=60)
    ran = await _generate(orchestrator, "hello", parts=[full], code=ExitCode.REFUSED)
    assert ran.stderr.splitlines() == ["error: 64 requests are in flight", "  try again in 60.0 s"]


async def test_a_failure_after_some_text_ends_the_line(orchestrator: ScriptedOrchestrator) -> None:
    parts: Script = [text("Hi"), UnavailableError("stage thinker is gone")]
    ran = await _generate(orchestrator, "hello", parts=parts, code=ExitCode.UNAVAILABLE)
    assert ran.stdout == "Hi\n"
    assert "thinker" in ran.stderr


async def test_an_unreachable_server_is_named_with_a_remedy() -> None:
    ran = await stagemesh("generate", "hello", "--server", "127.0.0.1:1")
    ran.check(ExitCode.UNAVAILABLE, "127.0.0.1:1", "stagemesh up")


async def test_a_running_request_can_be_cancelled(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.requests.append(GenerateRequest(request_id="r"))
    ran = await stagemesh("cancel", "r", "--server", orchestrator.endpoint)
    assert (ran.exit_code, ran.stdout) == (0, "cancelled r\n")
    ran = await stagemesh("cancel", "r", "--server", orchestrator.endpoint, "--json")
    assert json.loads(ran.stdout) == {"request_id": "r", "cancelled": True}
    assert [each.request_id for each in orchestrator.cancels] == ["r", "r"]
    ran = await stagemesh("cancel", "unknown", "--server", orchestrator.endpoint)
    ran.check(ExitCode.NOT_FOUND, "no request 'unknown' runs")


async def test_stages_shows_the_replicas(orchestrator: ScriptedOrchestrator) -> None:
    stage = orchestrator.description.stages.add(name="thinker", engine="vllm")
    stage.replicas.add(name="thinker-0", endpoint="127.0.0.1:20001", state="REPLICA_STATE_READY", planned=2)
    ran = await stagemesh("stages", "--server", orchestrator.endpoint, "--json")
    replica = json.loads(ran.stdout)["stages"][0]["replicas"][0]
    assert (replica["name"], replica["state"], replica["planned"]) == ("thinker-0", "REPLICA_STATE_READY", 2)


MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "what?"}, {"type": "image", "path": "cat.png"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
    },
    {"role": "tool", "content": "a cat", "tool_call_id": "c1"},
    {"role": "user", "content": [{"type": "video", "path": "cat.mp4", "use_audio_in_video": True}]},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


async def test_messages_and_tools_are_read_from_files(orchestrator: ScriptedOrchestrator, tmp_path: Path) -> None:
    for name, content in (("messages", MESSAGES), ("tools", TOOLS)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    for name in ("cat.png", "cat.mp4"):
        (tmp_path / name).write_bytes(name.encode())
    files = ["--messages", str(tmp_path / "messages.json"), "--tools", str(tmp_path / "tools.json")]
    await _generate(orchestrator, *files, "--template-arguments", '{"thinking": false}')
    sent = orchestrator.requests[0].input.conversation
    roles = [request_pb2.Role.Name(each.role) for each in sent.messages]
    assert roles == ["ROLE_USER", "ROLE_ASSISTANT", "ROLE_TOOL", "ROLE_USER"]
    assert [part.WhichOneof("content") for part in sent.messages[0].parts] == ["text", "image"]
    assert (sent.messages[0].parts[1].image.data, sent.messages[1].tool_calls[0].name) == (b"cat.png", "look")
    assert (sent.messages[2].tool_call_id, sent.messages[3].parts[0].use_audio_in_video) == ("c1", True)
    assert (sent.tools[0].parameters, sent.template_arguments) == ('{"type": "object"}', '{"thinking": false}')


async def test_a_raw_prompt_keeps_its_media_apart(orchestrator: ScriptedOrchestrator, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"png")
    await _generate(orchestrator, "<image>?", "--raw", "--attach", str(tmp_path / "cat.png"))
    sent = orchestrator.requests[0].input
    assert (sent.raw_text, sent.media[0].image.data) == ("<image>?", b"png")


@pytest.mark.parametrize(
    ("arguments", "content", "message"),
    [
        ([], "[]", "give either a prompt or --messages"),
        (["hi", "--messages", "FILE"], "[]", "give either a prompt or --messages"),
        (["--messages", "FILE", "--raw"], "[]", "contradicts --raw and --attach"),
        (["--messages", "FILE"], "{", "cannot read"),
        (["--messages", "FILE"], '[{"content": "a"}]', "missing required field `role`"),
        (["--messages", "FILE"], '[{"role": "user", "content": "a", "name": "b"}]', "unknown field `name`"),
        (["--messages", "FILE"], '[{"role": "robot", "content": "a"}]', "use one of system, developer, user"),
        (["hi", "--tools", "FILE"], '[{"type": "function"}]', "missing required field `function`"),
        (["hi", "--tools", "FILE", "--raw"], '[{"function": {"name": "look"}}]', "need a prompt or messages"),
    ],
    ids=str,
)
async def test_wrong_prompts_are_rejected(
    orchestrator: ScriptedOrchestrator, tmp_path: Path, arguments: list[str], content: str, message: str
) -> None:
    (tmp_path / "file.json").write_text(content)
    given = [str(tmp_path / "file.json") if each == "FILE" else each for each in arguments]
    ran = await stagemesh("generate", *given, "--server", orchestrator.endpoint)
    assert ran.exit_code != 0
    assert message in ran.error_text
    assert orchestrator.requests == []
