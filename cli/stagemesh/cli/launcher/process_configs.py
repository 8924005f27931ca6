"""Derives the configs of a pipeline's stages, of its media service and of its job server from the pipeline file."""

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.process.media_config import MediaConfig, MediaServiceConfig
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.jobs.config import JobServerConfig
from stagemesh.pipeline import Pipeline, Stage

MEDIA = "media"
JOBS = "jobs"


def stage_config(pipeline: Pipeline, stage: Stage, *, replica: str, listen: str) -> StageConfig:
    """Returns the config of a replica of a stage. `replica` is the replica's name, and `listen` is its "host:port"."""
    return StageConfig(
        pipeline=pipeline.name,
        generation=pipeline.generation,
        stage=stage.name,
        replica=replica,
        engine=stage.engine,
        function=stage.function,
        model=None if stage.model_path is None else str(stage.model_path),
        options=stage.options,
        listen=listen,
        data_plane=stage.data_plane,
        insecure_tcp=stage.insecure_tcp,
        stall_s=stage.stall_s,
        media=pipeline.media,
        non_finite=stage.non_finite,
        error_details=bool(stage.error_details),
    )


def media_service_config(pipeline: Pipeline, *, listen: str, name: str = MEDIA) -> MediaServiceConfig:
    """Returns the config of a media service of the pipeline, which listens at `listen` ("host:port").

    Raises InvalidRequestError (INVALID_CONFIG) if the pipeline has no store.
    """
    media = _stored_media(pipeline, ", so that it needs no media service", process="media service")
    return MediaServiceConfig(pipeline.name, listen, media, name=name)


def job_server_config(pipeline: Pipeline, *, listen: str, server: str) -> JobServerConfig:
    """Returns the config of a job server of the pipeline, which listens at `listen` ("host:port").

    `server` is the address of the orchestrator. Raises InvalidRequestError (INVALID_CONFIG) if the pipeline has no
    store.
    """
    media = _stored_media(pipeline, " for the results of jobs", process="job server")
    return JobServerConfig(pipeline.name, listen, [server], media)


def find_stage(pipeline: Pipeline, name: str, *, option: str = "") -> Stage:
    """Returns the stage `name`. `option` is the option that names it, as the prefix of the error's message.

    Raises InvalidRequestError (INVALID_CONFIG) if the pipeline has no such stage.
    """
    if name not in pipeline.stages:
        stages = ", ".join(pipeline.stages)
        raise InvalidRequestError(
            f"{option}pipeline {pipeline.name!r} has no stage {name!r}; its stages are {stages}",
            reason="INVALID_CONFIG",
        )
    return pipeline.stages[name]


def _stored_media(pipeline: Pipeline, purpose: str, *, process: str) -> MediaConfig:
    media = pipeline.media
    if media is None or not media.store:
        remedy = f"add `media: {{store: FOLDER OR URL}}` to its file, or start no {process}"
        text = f"pipeline {pipeline.name!r} has no object store{purpose}; {remedy}"
        raise InvalidRequestError(text, reason="INVALID_CONFIG")
    return media
