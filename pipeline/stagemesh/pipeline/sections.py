"""Checks the main stage, the limits, the sessions and the media of a pipeline file."""

from collections.abc import Iterator, Mapping, Sequence

from stagemesh.common.process.media_config import LOCAL, parse_root
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.pipeline.document import KeyPath, Problems, suggest
from stagemesh.pipeline.graph import SPEECH, Edge, PipelineOutput, Stage
from stagemesh.pipeline.schema import Limits, MediaEntry, PipelineFile


def check_media(media: MediaEntry, problems: Problems, *, check_packages: bool) -> None:
    """Reports an error for each option of a protocol that no location has.

    If `check_packages` is True, also reports a location whose protocol is unknown, or whose Python package is not
    installed.
    """
    roots = dict(_roots(media))
    if not roots:
        problems.add(("media",), "media names no location; add `store: FOLDER OR URL`, or `allowed` locations")
    protocols = {parse_root(root).protocol for root in roots.values()}
    for name in media.storage_options:
        if name not in protocols:
            text = f"no location of media has the protocol {name!r}; {suggest(name, protocols)}"
            problems.add(("media", "storage_options", name), text)
    for path, root in roots.items() if check_packages else ():
        if text := _missing_package(parse_root(root).protocol):
            problems.add(path, text)


def _roots(media: MediaEntry) -> Iterator[tuple[KeyPath, str]]:
    if media.store:
        yield ("media", "store"), media.store
    for number, root in enumerate(media.allowed):
        yield ("media", "allowed", number), root


def _missing_package(protocol: str) -> str:
    if protocol == LOCAL:
        return ""
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(protocol)
    except ImportError as exc:
        return f"{protocol}:// needs a Python package: {exc}; install it for every stage and for the media service"
    except ValueError:
        return f"fsspec does not know {protocol}://; use a folder, or a protocol such as s3://"
    return ""


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


def check_main_stage(file: PipelineFile, stages: Mapping[str, Stage], problems: Problems) -> None:
    """Checks `main_stage`. `stages` contains the stages of the file that have a valid engine and signature."""
    main_stage = file.main_stage
    sampling = [stage.name for stage in stages.values() if stage.signature.sampling]
    if main_stage is None:
        if len(sampling) > 1:
            text = f"stages {' and '.join(sampling)} choose tokens; name the one that requests mean by default"
            problems.add(("stages", sampling[1]), f"{text}: add `main_stage: {sampling[0]}`")
    elif main_stage not in file.stages:
        problems.add(("main_stage",), f"unknown stage {main_stage!r}; {suggest(main_stage, file.stages)}")
    elif main_stage in stages and sampling and main_stage not in sampling:
        text = f"stage {main_stage!r} does not choose tokens; name {' or '.join(sampling)}, or remove main_stage"
        problems.add(("main_stage",), text)


def check_limits(limits: Limits, problems: Problems) -> None:
    """Checks that no limit of a caller or of a request exceeds the limit of the pipeline."""
    for key in limits.per_caller.model_fields_set:
        value, most = getattr(limits.per_caller, key), getattr(limits, key)
        if value > most:
            text = f"limits.per_caller.{key} is {value}, more than limits.{key} ({most}); lower it, or remove it"
            problems.add(("limits", "per_caller", key), text)
    if "max_choices" in limits.model_fields_set and limits.max_choices > limits.largest_request:
        text = f"limits.max_choices is {limits.max_choices}; max_in_flight allows {limits.largest_request}; lower it"
        problems.add(("limits", "max_choices"), text)
