"""Checks the stage that detects the turns of sessions."""

from collections.abc import Mapping, Sequence

from stagemesh.common.tensors import TensorSpec
from stagemesh.orchestrator.spec.model import SPEECH, Edge, PipelineOutput, Stage
from stagemesh.orchestrator.spec.schema import PipelineFile
from stagemesh.orchestrator.spec.source.problem_lines import Problems, suggest

_TENSOR = "speech"
_TYPE = TensorSpec.parse("float64[events, 2]")


def resolve_speech(
    file: PipelineFile, stages: Mapping[str, Stage], edges: Sequence[Edge], problems: Problems
) -> PipelineOutput | None:
    """Checks the stage that detects turns. Returns its output, or None if no stage detects turns.

    Reports errors to `problems`.
    """
    name = file.sessions.turn_detection
    if name is None or (name in file.stages and name not in stages):
        return None
    if name not in stages:
        text = f"unknown stage {name!r}; {suggest(name, file.stages)}"
    elif _TENSOR not in (emits := stages[name].signature.emits) or not _TYPE.accepts(emits[_TENSOR].spec):
        text = f"stage {name!r} does not emit {_TENSOR}: {_TYPE}; name a stage that detects turns, such as audio.turns"
    elif not any(edge.is_input and edge.consumer == name and "audio" in edge.tensors for edge in edges):
        text = f'stage {name!r} receives no audio of the client; add the edge {{from: "@input", to: {name}}}'
    else:
        return PipelineOutput(name=SPEECH, source=f"{name}.{_TENSOR}", kind=emits[_TENSOR].kind, sample_rate_hz=0)
    problems.add(("sessions", "turn_detection"), text)
    return None
