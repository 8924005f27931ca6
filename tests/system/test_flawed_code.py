"""Wrong code of a function or of a transform, and the error that the client then receives."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stagemesh.client import Result
from stagemesh.common.errors import InternalError, StagemeshError
from tests.deployment import Deployment, deployed
from tests.rpc.call_errors import raises
from tests.system.added_transforms import add_function, add_transform
from tests.system.pipelines import pipeline_file

STATELESS = """\
class Stateless:
    def __init__(self, model, options):
        pass

    def open(self, *, seed, options):
        return None
"""
FLAWS = """\
import os
import sys

import numpy as np
from stagemesh.connectors.packets import Packet

AUDIO = np.zeros(100, np.float32)


def flawed(how):
    match how:
        case "raise":
            raise LookupError("no such voice")
        case "exit":
            sys.exit(3)
        case "none":
            return None
        case "array":
            return AUDIO
        case "arrays":
            return [AUDIO]
        case "type":
            return [Packet({"audio": memoryview(b"1234")})]
        case "name":
            return [Packet({"audo": AUDIO})]
        case "dtype":
            return [Packet({"audio": AUDIO.astype(np.int16)})]
        case "shape":
            return [Packet({"audio": AUDIO[None]})]
        case "nan":
            return [Packet({"audio": AUDIO * np.nan})]
        case "nothing":
            return []
        case "memory":
            return [Packet({"audio": np.zeros(1 << 50, np.float32)})]
        case "die":
            os._exit(9)
    return [Packet({"audio": AUDIO})]
"""
FUNCTION = f"""\
{FLAWS}
from stagemesh.common.plugins.descriptors import Emitted, FunctionDescriptor, Signature
from stagemesh.common.wire.tensors import TensorSpec

_TEXT = Emitted(TensorSpec.parse("uint8[bytes]"), kind="text")
_AUDIO = Emitted(TensorSpec.parse("float32[samples]"), kind="audio", sample_rate_hz=16_000)
DESCRIPTOR = FunctionDescriptor(Signature(emits={{"text": _TEXT, "audio": _AUDIO}}), "added_speak:Speak")


{STATELESS}

class Speak(Stateless):
    def __call__(self, batch):
        results = []
        for call in batch:
            text = call.packet.tensors["text"] if call.packet else np.zeros(0, np.uint8)
            where, _, how = text.tobytes().decode().partition(" ")
            if where == "function":
                made = flawed(how)
                if how in ("none", "array"):
                    return made
                results.append(made)
            else:
                results.append([Packet({{"text": text, "audio": AUDIO}})] if call.packet else [])
        return results
"""
"""Speaks silence. The prompt says what is wrong, for example "function raise"."""
TRANSFORM = f"""\
{FLAWS}
from stagemesh.common.plugins.descriptors import TransformDescriptor
from stagemesh.common.wire.tensors import TensorSpec

_TEXT, _AUDIO = TensorSpec.parse("uint8[bytes]"), TensorSpec.parse("float32[samples]")
DESCRIPTOR = TransformDescriptor({{"text": _TEXT, "audio": _AUDIO}}, {{"audio": _AUDIO}}, "added_pass:Pass")


class Pass:
    def __init__(self, model):
        pass

    def push(self, packet):
        if "text" not in packet.tensors:
            return [packet]
        where, _, how = packet.tensors["text"].tobytes().decode().partition(" ")
        return flawed(how if where == "transform" else "")

    def finish(self):
        return []
"""
PLAYER = f"""\
from stagemesh.common.plugins.descriptors import Emitted, FunctionDescriptor, Signature
from stagemesh.common.wire.tensors import TensorSpec

_AUDIO = TensorSpec.parse("float32[samples]")
DESCRIPTOR = FunctionDescriptor(
    Signature(accepts={{"audio": _AUDIO}}, emits={{"audio": Emitted(_AUDIO, kind="audio", sample_rate_hz=16_000)}}),
    "added_play:Play",
)


{STATELESS}

class Play(Stateless):
    def __call__(self, batch):
        return [[call.packet] if call.packet else [] for call in batch]
"""
PIPELINE = """
pipeline: flawed
stages:
  speak: {engine: function, function: speak, options: {max_batch: 1}}
  play: {engine: function, function: play, non_finite: warn}
  strict: {engine: function, function: play, non_finite: error}
edges: [{from: speak, to: play, transform: pass}, {from: speak, to: strict, transform: pass}]
outputs: {audio: play.audio, spoken: speak.audio, strict: strict.audio}
"""
WHERE = {"function": "function speak of stage speak", "transform": "transform pass of edge speak->play"}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("flawed")
    with pytest.MonkeyPatch.context() as monkeypatch:
        add_function(folder, monkeypatch, name="speak", source=FUNCTION)
        add_function(folder, monkeypatch, name="play", source=PLAYER)
        add_transform(folder, monkeypatch, name="pass", source=TRANSFORM)
        with deployed(pipeline_file(folder, PIPELINE)) as deployment:
            yield deployment


def _generate(up: Deployment, prompt: str, *outputs: str) -> Result:
    with up.client() as client:
        return client.generate(prompt, timeout_s=60, outputs=outputs or ("audio", "spoken")).result()


def _error_of(up: Deployment, prompt: str) -> StagemeshError:
    """Returns the error of a request. No process restarts meanwhile."""
    before = [up.process_id(name) for name in ("speak-0", "play-0")]
    with pytest.raises(StagemeshError) as caught:
        _generate(up, prompt)
    assert [up.process_id(name) for name in ("speak-0", "play-0")] == before
    return caught.value


def test_correct_code(up: Deployment) -> None:
    assert len(_generate(up, "transform right").audios["audio"].samples) == 100


@pytest.mark.parametrize("where", ["function", "transform"])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("none", "returned NoneType"),
        ("array", "returned ndarray"),
        ("arrays", "returned a list with ndarray"),
        ("type", "tensor 'audio' as memoryview; it must be a numpy array"),
        ("name", "tensor 'audo' is not declared; declared: "),
        ("dtype", r"tensor 'audio' is int16[100]; expected float32[samples]"),
        ("shape", r"tensor 'audio' is float32[1, 100]; expected float32[samples]"),
    ],
)
def test_a_wrong_result_is_named(up: Deployment, where: str, how: str, message: str) -> None:
    error = _error_of(up, f"{where} {how}")
    assert (type(error), error.reason) == (InternalError, "INVALID_RESULT")
    assert message in error.message
    assert WHERE[where] in error.message
    folder = next(Path(each["logs"]) for each in up.history if each.get("event") == "ready")
    log = folder / {"function": "speak-0.log", "transform": "play-0.log"}[where]
    assert error.message in log.read_text()


@pytest.mark.parametrize("where", ["function", "transform"])
@pytest.mark.parametrize(
    ("how", "message"),
    [("raise", "raised LookupError: no such voice ("), ("exit", "raised SystemExit: 3 ("), ("memory", "MemoryError: ")],
)
def test_an_exception_is_named_with_its_place(up: Deployment, where: str, how: str, message: str) -> None:
    error = _error_of(up, f"{where} {how}")
    assert (type(error), error.reason) == (InternalError, "ENGINE_ERROR")
    assert message in error.message
    name = {"function": "added_speak", "transform": "added_pass"}[where]
    assert f"{name}.py, line " in error.message
    log = Path(error.message.partition("; the log ")[2].partition(" has the traceback")[0])
    assert "Traceback (most recent call last)" in log.read_text()


@pytest.mark.parametrize(("where", "outputs"), [("function", {"audio", "spoken"}), ("transform", {"audio"})])
def test_an_empty_output_says_so(up: Deployment, where: str, outputs: set[str]) -> None:
    result = _generate(up, f"{where} nothing")
    assert {name for name, each in result.choices[0].finishes.items() if each.reason == "empty"} == outputs


@pytest.mark.parametrize(("where", "stages"), [("function", {"speak", "play"}), ("transform", {"play"})])
def test_non_finite_audio_is_a_warning(up: Deployment, where: str, stages: set[str]) -> None:
    result = _generate(up, f"{where} nan")
    assert np.isnan(result.audios["audio"].samples).all()
    warned = {name: report.warnings for name, report in result.finished.stages.items() if report.warnings}
    assert {name: warnings[0].reason for name, warnings in warned.items()} == dict.fromkeys(stages, "NON_FINITE_RESULT")


def test_non_finite_audio_is_an_error_on_request(up: Deployment) -> None:
    with pytest.raises(StagemeshError) as caught:
        _generate(up, "transform nan", "strict")
    assert (caught.value.reason, caught.value.metadata["stage"]) == ("NON_FINITE_RESULT", "strict")


@pytest.mark.parametrize("where", ["function", "transform"])
def test_code_that_ends_its_process_is_poison(up: Deployment, where: str) -> None:
    with raises(StagemeshError, reason="POISON_REQUEST"):
        _generate(up, f"{where} die", "strict")
    up.wait(Deployment.all_ready)
