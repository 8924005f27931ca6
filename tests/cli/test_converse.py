import asyncio
import json
import signal
import wave
from pathlib import Path

import numpy as np
import pytest

from stagemesh.client import WavWriter
from stagemesh.common.errors import ExitCode, InternalError, NotReadyError, UnsupportedError
from stagemesh.v1 import orchestrator_pb2
from stagemesh.v1.request_pb2 import ROLE_SYSTEM
from tests.cli.commands import run_process, start
from tests.client.scripted import Pause, ScriptedOrchestrator, Talk, admitted, audio, finished
from tests.client.scripted_sessions import (
    committed,
    generated,
    interrupted,
    kinds,
    opened,
    rejected,
    speech,
    text,
    texts,
    turn_ended,
)


def _answer(turn: int, line: str) -> Talk:
    outputs = [generated(turn, admitted()), text(turn, line), generated(turn, audio([0.0] * 240))]
    return ["commit", committed(turn), *outputs, generated(turn, finished()), turn_ended(turn, line)]


def _write_recording(path: Path, seconds: float) -> None:
    with WavWriter(path) as wav:
        wav.write(np.full(int(8_000 * seconds), 0.5, np.float32), sample_rate_hz=8_000)


def _frames(path: Path) -> int:
    with wave.open(str(path)) as file:
        return int(file.getnframes())


async def test_each_line_is_a_turn(orchestrator: ScriptedOrchestrator, tmp_path: Path) -> None:
    orchestrator.talks.append([opened(), *_answer(1, "Hi."), *_answer(2, "Fine."), "close"])
    arguments = ["--server", orchestrator.endpoint, "--audio", str(tmp_path / "a.wav")]
    ran = await run_process("converse", *arguments, stdin="hello\n\nhow are you?\n")
    assert (ran.exit_code, ran.stdout) == (0, "Hi.\nFine.\n")
    assert texts(orchestrator.events[0]) == ["hello", "how are you?"]
    assert all(part in ran.stderr for part in ("turn 1: first text", "turn 2: first text", "first audio", "wrote"))
    assert _frames(tmp_path / "a.wav") == 480


async def test_spoken_lines_are_one_streamed_turn(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.talks.append([opened(), *_answer(1, "Hi."), "close"])
    ran = await run_process("converse", "--speak", "--server", orchestrator.endpoint, stdin="One.\nTwo.")
    assert (ran.exit_code, texts(orchestrator.events[0])) == (0, ["One.\n", "Two."])
    assert orchestrator.events[0][0].open.input_mode == orchestrator_pb2.INPUT_MODE_STREAM


async def test_options_reach_the_server(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.talks.append(["open", opened(), "close"])
    options = ["--system", "Be brief.", "--max-tokens", "9", "--option", "speed=1.5", "--outputs", "audio"]
    options += ["--stage-parameter", "talker.voice=alto", "--timeout", "2.5", "--session-id", "s", "--caller", "me"]
    (await run_process("converse", "--server", orchestrator.endpoint, "--seed", "3", *options)).check(0)
    sent = orchestrator.events[0][0].open
    assert (sent.conversation.messages[0].role, sent.conversation.messages[0].content) == (ROLE_SYSTEM, "Be brief.")
    assert (sent.parameters.sampling.max_tokens, sent.parameters.options["speed"].number) == (9, 1.5)
    assert (list(sent.outputs), sent.parameters.seed, sent.turn_timeout_s) == (["audio"], 3, 2.5)
    assert sent.parameters.stages["talker"].options["voice"].text == "alto"
    assert (sent.session_id, sent.caller) == ("s", "me")


async def test_a_microphone_is_one_turn(orchestrator: ScriptedOrchestrator, tmp_path: Path) -> None:
    _write_recording(tmp_path / "me.wav", 0.35)
    orchestrator.talks.append([opened(), *_answer(1, "Hi."), "close"])
    ran = await run_process("converse", "--microphone", str(tmp_path / "me.wav"), "--server", orchestrator.endpoint)
    assert (ran.exit_code, ran.stdout) == (0, "Hi.\n")
    pieces = [event.append.part.audio for event in orchestrator.events[0] if event.HasField("append")]
    assert [(piece.samples.shape[0], piece.sample_rate_hz) for piece in pieces] == [(800, 8_000)] * 3 + [(400, 8_000)]


async def test_the_pipeline_detects_turns(orchestrator: ScriptedOrchestrator, tmp_path: Path) -> None:
    _write_recording(tmp_path / "me.wav", 0.2)
    found: Talk = [speech(1, begins=True, at_s=0.0), speech(1, begins=False, at_s=0.1), committed(1, audio_end_s=0.1)]
    empty = NotReadyError("turn 2 has no input", reason="EMPTY_TURN")
    steps: Talk = [*found, text(1, "Hi."), turn_ended(1, "Hi."), "commit", rejected(3, empty)]
    orchestrator.talks.append(["open", opened(), "append", *steps, "close"])
    options = ["--interruptible", "--detection-option", "silence_ms=100"]
    arguments = ["--microphone", str(tmp_path / "me.wav"), "--server", orchestrator.endpoint]
    ran = await run_process("converse", *arguments, *options)
    assert (ran.exit_code, ran.stdout) == (0, "Hi.\n"), ran.stderr
    detection = orchestrator.events[0][0].open.turn_detection
    assert (detection.interrupts, detection.options["silence_ms"].integer) == (True, 100)


async def test_events_can_be_printed_as_json(orchestrator: ScriptedOrchestrator, tmp_path: Path) -> None:
    orchestrator.talks.append([opened(), *_answer(1, "Hi."), "close"])
    arguments = ["--json", "--audio", str(tmp_path / "a.wav"), "--server", orchestrator.endpoint]
    ran = await run_process("converse", *arguments, stdin="hello\n")
    events = [json.loads(line) for line in ran.stdout.splitlines()]
    names = [next(name for name in event if name not in {"turn", "ignorable"}) for event in events]
    assert names == ["opened", "committed", *["generated"] * 4, "ended"]
    assert events[3]["generated"]["output"]["text"] == "Hi."
    assert (events[-1]["ended"]["answer"], ran.stderr) == ("Hi.", "")
    assert _frames(tmp_path / "a.wav") == 240


async def test_a_failed_turn_determines_the_exit_code(orchestrator: ScriptedOrchestrator) -> None:
    failed: Talk = ["commit", committed(1), text(1, "Hi"), turn_ended(1, "Hi", InternalError("the stage failed"))]
    orchestrator.talks.append([opened(), *failed, *_answer(2, "Fine."), "close"])
    ran = await run_process("converse", "--server", orchestrator.endpoint, stdin="one\ntwo\n")
    assert (ran.exit_code, ran.stdout) == (ExitCode.FAILED, "Hi\nFine.\n")
    assert "error: the stage failed" in ran.stderr


async def test_a_session_that_cannot_be_opened_is_an_error(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.talks.append([UnsupportedError("the pipeline streams no input")])
    ran = await run_process("converse", "--speak", "--server", orchestrator.endpoint, stdin="one\n")
    assert (ran.exit_code, ran.stderr) == (ExitCode.FAILED, "error: the pipeline streams no input\n")
    ran = await run_process("converse", "--server", "127.0.0.1:1", stdin="one\n")
    assert ran.exit_code == ExitCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--turn-detection"], "it needs --microphone"),
        (["--detection-option", "silence_ms=3"], "it needs --microphone"),
        (["--speak", "--system", "Be brief."], "streamed input has no instructions"),
        (["--microphone", "missing.wav"], "does not exist"),
    ],
    ids=str,
)
async def test_wrong_options_are_rejected(
    orchestrator: ScriptedOrchestrator, arguments: list[str], message: str
) -> None:
    (await run_process("converse", "--server", orchestrator.endpoint, *arguments)).check(ExitCode.USAGE, message)
    assert orchestrator.events == []


async def test_ctrl_c_interrupts_the_answer_and_then_ends(orchestrator: ScriptedOrchestrator) -> None:
    stop: Talk = ["interrupt", interrupted(1, text=2), turn_ended(1, "Hi")]
    orchestrator.talks.append([opened(), *_answer(1, "Hi")[:4], *stop, "close", Pause.FOREVER])
    process = await start("converse", "--server", orchestrator.endpoint)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(b"hello\n")
    async with asyncio.timeout(30):
        assert await process.stdout.readexactly(2) == b"Hi"
        process.send_signal(signal.SIGINT)
        assert await process.stderr.readline() == b"turn 1 was interrupted\n"
        process.send_signal(signal.SIGINT)
        assert await process.wait() == ExitCode.INTERRUPTED
    assert kinds(orchestrator.events[0]) == ["open", "append", "commit", "interrupt", "close"]
