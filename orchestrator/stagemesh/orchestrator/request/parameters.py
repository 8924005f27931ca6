"""A request's parameters: their check against the pipeline, and the parameters of each stage."""

from collections.abc import Mapping

from stagemesh.common.errors import InvalidRequestError, UnsupportedError
from stagemesh.common.requests.request_checks import check_known, check_options, check_sampling, read_options
from stagemesh.pipeline import Pipeline, Stage
from stagemesh.pipeline.schema import FramesEntry
from stagemesh.v1 import request_pb2, tensor_pb2

_ENABLE_ADAPTERS = "start a stage with the option enable_lora if its engine supports it"


def check_parameters(parameters: request_pb2.Parameters, pipeline: Pipeline) -> None:
    """Checks a request's parameters.

    Raises InvalidRequestError (UNKNOWN_STAGE, UNKNOWN_OPTION, INVALID_OPTION, INVALID_SAMPLING) or UnsupportedError if
    the pipeline or a stage does not take the parameters.
    """
    check_known(parameters, *parameters.stages.values())
    main = [stage for stage in pipeline.stages.values() if stage.is_main and not stage.assisted]
    owner = f"the main stage {main[0].name!r}" if len(main) == 1 else f"every stage of pipeline {pipeline.name!r}"
    if parameters.sampling.ByteSize() and not any(stage.signature.sampling for stage in main):
        raise _unsupported(f"{owner} works without sampling parameters; omit them")
    if parameters.adapter and not any(stage.signature.adapters for stage in main):
        raise _unsupported(f"{owner} works without adapters; leave adapter unset, or {_ENABLE_ADAPTERS}")
    for name, given in parameters.stages.items():
        if name not in pipeline.stages or pipeline.stages[name].assisted:
            named = [each.name for each in pipeline.stages.values() if not each.assisted]
            raise InvalidRequestError(
                f"parameters are given for stage {name[:100]!r}, but pipeline {pipeline.name!r} has the stages "
                f"{', '.join(named)}",
                reason="UNKNOWN_STAGE",
            )
        _check_stage(given, pipeline.stages[name])
        _check_chunk(given.chunk, pipeline, name)
    check_options(read_options(parameters.options), pipeline.options, owner=f"pipeline {pipeline.name!r}")
    for stage in pipeline.stages.values():
        # The merged parameters, because plain parameters and those of the stage may contradict each other.
        check_sampling(parameters_of(stage, parameters).sampling)


def parameters_of(stage: Stage, parameters: request_pb2.Parameters) -> request_pb2.StageParameters:
    """Returns the parameters of a request for one stage. Values that name the stage take precedence.

    A stage that computes a part of another stage's work has the adapter of that stage.
    """
    signature, name = stage.signature, stage.assisted or stage.name
    found = request_pb2.StageParameters()
    if stage.is_main and signature.sampling and parameters.HasField("sampling"):
        found.sampling.CopyFrom(parameters.sampling)
    if stage.is_main and signature.adapters and parameters.HasField("adapter"):
        found.adapter = parameters.adapter
    _copy_options(found, {name: value for name, value in parameters.options.items() if name in signature.options})
    if name in parameters.stages:
        own = parameters.stages[name]
        if signature.sampling:
            for field in {field.name for field, _ in own.sampling.ListFields()}:
                # Otherwise the merge would append to a repeated field.
                found.sampling.ClearField(field)  # type: ignore[arg-type]
            found.sampling.MergeFrom(own.sampling)
        if own.HasField("adapter"):
            found.adapter = own.adapter
        _copy_options(found, {name: value for name, value in own.options.items() if name in signature.options})
    if not found.sampling.ByteSize():
        found.ClearField("sampling")
    return found


def _copy_options(target: request_pb2.StageParameters, options: Mapping[str, tensor_pb2.TypedValue]) -> None:
    for name, value in options.items():
        target.options[name].CopyFrom(value)


def _check_stage(given: request_pb2.StageParameters, stage: Stage) -> None:
    owner, signature = f"stage {stage.name!r}", stage.signature
    if given.sampling.ByteSize() and not signature.sampling:
        raise _unsupported(f"{owner} does not choose tokens; omit its sampling parameters", stage=stage.name)
    if given.adapter and not signature.adapters:
        raise _unsupported(f"{owner} accepts no adapters; omit its adapter, or {_ENABLE_ADAPTERS}", stage=stage.name)
    check_options(read_options(given.options), signature.options, owner=owner)


def _check_chunk(given: request_pb2.ChunkParameters, pipeline: Pipeline, stage: str) -> None:
    if given.WhichOneof("cut") is None:
        return
    edges = {edge.name: edge.chunk for edge in pipeline.incoming(stage) if isinstance(edge.chunk, FramesEntry)}
    if not edges:
        raise _unsupported(f"no edge to stage {stage!r} is cut by frames; omit its parameter chunk", stage=stage)
    for edge, chunk in edges.items():
        bounds = range(chunk.first_frames, chunk.frames + 1)
        if given.HasField("initial_frames") and given.initial_frames not in bounds:
            raise InvalidRequestError(
                f"the first chunk of edge {edge} would have {given.initial_frames} frames; use {bounds[0]} to "
                f"{bounds[-1]}, the bounds in the pipeline file",
                reason="INVALID_INITIAL_FRAMES",
                metadata={"edge": edge},
            )


def _unsupported(message: str, **metadata: str) -> UnsupportedError:
    return UnsupportedError(message, metadata=metadata)
