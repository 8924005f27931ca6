"""Parameters of a request: their check against the pipeline, and what each stage receives."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stagemesh.common.errors import InvalidPipelineError, InvalidRequestError, StagemeshError
from stagemesh.common.plugins.descriptors import OptionSpec
from stagemesh.common.requests.request_checks import check_options
from stagemesh.common.wire.tensors import Value, to_messages
from stagemesh.orchestrator.request.parameters import check_parameters, parameters_of
from stagemesh.pipeline import Pipeline, Stage, load_pipeline
from stagemesh.v1 import request_pb2

OMNI = """
pipeline: omni
main_stage: thinker
stages:
  thinker: {engine: fake, function: source}
  talker: {engine: fake, function: talk}
  sound: {engine: fake, function: frames}
edges: [{from: thinker, to: talker}, {from: talker, to: sound}]
outputs: {text: thinker, speech: talker, frames: sound}
"""
OPTIONS = {
    "speed": OptionSpec(1.0, 0.5, 2.0),
    "steps": OptionSpec(20, 1, 50),
    "echo": OptionSpec(default=False),
    "voice": OptionSpec("alto", allowed_texts=("alto", "bass")),
    "instructions": OptionSpec("", maximum=10),
}


@pytest.fixture
def omni(tmp_path: Path) -> Pipeline:
    return _load(tmp_path, OMNI)


def _load(folder: Path, text: str) -> Pipeline:
    path = folder / "omni.yaml"
    path.write_text(text)
    return load_pipeline(str(path))


def _with_options(stage: Stage, **fields: object) -> Stage:
    signature = replace(stage.signature, options=OPTIONS, adapters=True)
    return stage.model_copy(update={"signature": signature, **fields})


def _rejection(parameters: request_pb2.Parameters, pipeline: Pipeline) -> StagemeshError:
    with pytest.raises(StagemeshError) as caught:
        check_parameters(parameters, pipeline)
    return caught.value


def test_plain_sampling_means_the_main_stage_alone(omni: Pipeline) -> None:
    parameters = request_pb2.Parameters(sampling=request_pb2.Sampling(max_tokens=5, stop=["."]))
    check_parameters(parameters, omni)
    assert parameters_of(omni.stages["thinker"], parameters).sampling == parameters.sampling
    assert not parameters_of(omni.stages["talker"], parameters).HasField("sampling")


def test_parameters_of_a_stage_precede_plain_ones_field_by_field(omni: Pipeline) -> None:
    plain = request_pb2.Sampling(max_tokens=5, stop=["."], temperature=0.5, regex="a+")
    own = request_pb2.StageParameters(sampling=request_pb2.Sampling(max_tokens=7, stop=["!"], json_schema="{}"))
    parameters = request_pb2.Parameters(sampling=plain, stages={"thinker": own})
    check_parameters(parameters, omni)
    assert parameters_of(omni.stages["thinker"], parameters).sampling == request_pb2.Sampling(
        max_tokens=7, stop=["!"], temperature=0.5, json_schema="{}"
    )


def test_options_apply_to_every_stage_that_declares_them(omni: Pipeline) -> None:
    parameters = request_pb2.Parameters(options=to_messages({"speed": 2}))
    parameters.stages["talker"].options["speed"].number = 0.5
    sound = parameters_of(_with_options(omni.stages["sound"]), parameters)
    talker = parameters_of(_with_options(omni.stages["talker"]), parameters)
    assert (sound.options["speed"].integer, talker.options["speed"].number) == (2, 0.5)
    assert not parameters_of(omni.stages["thinker"], parameters).options


def test_an_empty_adapter_of_a_stage_overrides_the_plain_one(omni: Pipeline) -> None:
    parameters = request_pb2.Parameters(adapter="warm", stages={"talker": request_pb2.StageParameters(adapter="")})
    thinker, talker = (_with_options(omni.stages[name], is_main=True) for name in ("thinker", "talker"))
    assert parameters_of(thinker, parameters).adapter == "warm"
    assert parameters_of(talker, parameters).adapter == ""


@pytest.mark.parametrize(
    ("stage", "own", "reason", "text"),
    [
        ("singer", request_pb2.StageParameters(), "UNKNOWN_STAGE", "has the stages thinker, talker, sound"),
        (
            "sound",
            request_pb2.StageParameters(sampling=request_pb2.Sampling(max_tokens=3)),
            "UNSUPPORTED",
            "'sound' does not choose",
        ),
        (
            "talker",
            request_pb2.StageParameters(sampling=request_pb2.Sampling(max_tokens=0)),
            "INVALID_SAMPLING",
            "max_tokens is 0",
        ),
        ("talker", request_pb2.StageParameters(adapter="warm"), "UNSUPPORTED", "'talker' accepts no adapters"),
        (
            "talker",
            request_pb2.StageParameters(options=to_messages({"voice": "alto"})),
            "UNKNOWN_OPTION",
            "unknown option 'voice'; stage 'talker' has none",
        ),
    ],
)
def test_parameters_that_a_stage_does_not_take_are_rejected(
    omni: Pipeline, stage: str, own: request_pb2.StageParameters, reason: str, text: str
) -> None:
    error = _rejection(request_pb2.Parameters(stages={stage: own}), omni)
    assert error.reason == reason
    assert text in error.message


@pytest.mark.parametrize(
    ("stage", "chunk", "reason", "text"),
    [
        (
            "talker",
            {"whole": True},
            "UNSUPPORTED",
            "no edge to stage 'talker' is cut by frames; omit its parameter chunk",
        ),
        ("thinker", {"initial_frames": 1}, "UNSUPPORTED", "no edge to stage 'thinker' is cut by frames"),
        ("sound", {"initial_frames": 3}, "INVALID_INITIAL_FRAMES", "would have 3 frames; use 4 to 25, the bounds"),
        ("sound", {"initial_frames": 26}, "INVALID_INITIAL_FRAMES", "edge talker->sound would have 26 frames"),
        ("sound", {"initial_frames": 0}, "INVALID_INITIAL_FRAMES", "would have 0 frames"),
    ],
)
def test_a_first_chunk_outside_the_bounds_is_rejected(
    tmp_path: Path, stage: str, chunk: dict[str, Any], reason: str, text: str
) -> None:
    cut = _load(tmp_path, OMNI.replace("to: sound}", "to: sound, chunk: {frames: 25, ramp: [4, 9]}}"))
    own = request_pb2.StageParameters(chunk=request_pb2.ChunkParameters(**chunk))
    error = _rejection(request_pb2.Parameters(stages={stage: own}), cut)
    assert error.reason == reason
    assert text in error.message


def test_chunk_parameters_reach_no_stage(omni: Pipeline, tmp_path: Path) -> None:
    cut = _load(tmp_path, OMNI.replace("to: sound}", "to: sound, chunk: {frames: 25, ramp: [4, 9]}}"))
    own = request_pb2.StageParameters(chunk=request_pb2.ChunkParameters(initial_frames=4))
    parameters = request_pb2.Parameters(stages={"sound": own, "talker": request_pb2.StageParameters()})
    check_parameters(parameters, cut)
    assert not parameters_of(cut.stages["sound"], parameters).HasField("chunk")


def test_plain_parameters_that_no_stage_takes_are_rejected(omni: Pipeline, tmp_path: Path) -> None:
    error = _rejection(request_pb2.Parameters(adapter="warm"), omni)
    assert error.message.startswith("the main stage 'thinker' works without adapters; leave adapter unset")
    frames = _load(tmp_path, OMNI.replace("main_stage: thinker\n", "").replace("talk}", "relay}"))
    silent = replace(
        frames,
        stages={
            name: stage.model_copy(update={"signature": replace(stage.signature, sampling=False)})
            for name, stage in frames.stages.items()
        },
    )
    error = _rejection(request_pb2.Parameters(sampling=request_pb2.Sampling(max_tokens=3)), silent)
    assert error.message == "every stage of pipeline 'omni' works without sampling parameters; omit them"


@pytest.mark.parametrize(
    ("given", "read"),
    [({"speed": 2}, 2.0), ({"steps": 30.0}, 30), ({"echo": True}, True), ({"voice": "bass"}, "bass")],
)
def test_a_value_gets_the_type_of_its_option(given: dict[str, Value], read: Value) -> None:
    (value,) = check_options(given, OPTIONS, owner="stage 'x'").values()
    assert (value, type(value)) == (read, type(read))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("speed", "fast", "'speed' is 'fast'; it must be a number from 0.5 to 2"),
        ("speed", True, "'speed' is True; it must be a number from 0.5 to 2"),
        ("speed", float("nan"), "'speed' is nan; it must be a number from 0.5 to 2"),
        ("steps", 2.5, "'steps' is 2.5; it must be a whole number from 1 to 50"),
        ("steps", float("inf"), "'steps' is inf; it must be a whole number from 1 to 50"),
        ("echo", 1, "'echo' is 1; it must be true or false"),
        ("voice", "tenor", "'voice' is 'tenor'; it must be one of 'alto', 'bass'"),
        ("instructions", "x" * 11, "it must be text of at most 10 characters"),
    ],
)
def test_a_value_of_another_type_or_outside_the_bounds_is_rejected(name: str, value: Value, text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_options({name: value}, OPTIONS, owner="stage 'x'")
    assert (caught.value.reason, caught.value.metadata["option"]) == ("INVALID_OPTION", name)
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            "",
            "stages thinker and talker choose tokens; name the one that requests mean by default: add `main_stage:",
        ),
        ("main_stage: thinkre\n", "unknown stage 'thinkre'; did you mean 'thinker'?"),
        ("main_stage: sound\n", "stage 'sound' does not choose tokens; name thinker or talker, or remove main_stage"),
    ],
)
def test_a_pipeline_with_several_stages_that_choose_tokens_names_its_main_stage(
    tmp_path: Path, line: str, text: str
) -> None:
    with pytest.raises(InvalidPipelineError) as caught:
        _load(tmp_path, OMNI.replace("main_stage: thinker\n", line))
    assert text in caught.value.message


def test_plain_parameters_that_contradict_those_of_a_stage_are_rejected(omni: Pipeline) -> None:
    own = request_pb2.StageParameters(sampling=request_pb2.Sampling(min_tokens=10))
    parameters = request_pb2.Parameters(sampling=request_pb2.Sampling(max_tokens=5), stages={"thinker": own})
    assert "min_tokens is 10 but max_tokens is 5" in _rejection(parameters, omni).message
