"""`/v1/videos`: videos that a pipeline makes as jobs."""

import re
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import Field

from stagemesh.client import Content, GenerateArguments, Job, MediaFile
from stagemesh.client.media_transfer import stream_file
from stagemesh.common.errors import InvalidRequestError, NotFoundError, NotReadyError
from stagemesh.gateway import parameters
from stagemesh.gateway.answers import list_page
from stagemesh.gateway.body import StageBody, is_json, option_values, read_form, read_json, validate
from stagemesh.gateway.catalog import Model, catalog_of, find_model
from stagemesh.gateway.errors import ParameterError, error_response
from stagemesh.gateway.routes.images import images_of, size_options

router = APIRouter()

_MARK = "openai_object"
"""The label of jobs that are videos."""
_VIDEO = "video"
_LABEL_LENGTH = 1024
_IMAGE = "input_reference"
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")
_STATUSES: Mapping[str, str] = {
    "queued": "queued",
    "running": "in_progress",
    "succeeded": "completed",
    "failed": "failed",
    "cancelled": "failed",
}


class VideoBody(StageBody):
    """The body of a request for a video. The size and the seconds are options of the pipeline's stages."""

    rules = parameters.RULES["videos"]

    prompt: Annotated[str, Field(min_length=1)]
    negative_prompt: str | None = None
    seconds: Annotated[float | None, Field(gt=0)] = None
    size: str | None = None
    aspect_ratio: str | None = None
    num_frames: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None

    def arguments(self, model: Model) -> GenerateArguments:
        """Returns the arguments of the client for this request, without the prompt."""
        arguments = self.stage_arguments(model)
        # The later requests for the video do not contain a user.
        arguments.pop("caller", None)
        names = ("seconds", "aspect_ratio", "num_frames", "num_inference_steps", "guidance_scale")
        own = option_values(model, self, *names)
        options = {**self.options, **size_options(self.size, model), **own}
        return arguments | {"outputs": [_output_of(model)], "negative_prompt": self.negative_prompt, "options": options}

    def labels(self) -> Mapping[str, str]:
        """Returns the labels of the job, which contain the parameters that the responses repeat."""
        seconds = "" if self.seconds is None else f"{self.seconds:g}"
        labels = {"model": self.model, "prompt": self.prompt, "seconds": seconds, "size": self.size or ""}
        return {_MARK: _VIDEO, **{name: text[:_LABEL_LENGTH] for name, text in labels.items()}}


class _Video(NamedTuple):
    """A video, and the model that makes it."""

    model: Model
    job: Job


@router.post("/v1/videos")
async def create_video(request: Request) -> dict[str, Any]:
    """Submits a job that makes a video. The body is JSON, or a form with the file `input_reference`."""
    body, prompt = await _read_body(request)
    model = await find_model(request, body.model)
    job = await model.client.jobs.submit(prompt, labels=body.labels(), **body.arguments(model))
    return {**_to_object(job), **parameters.warnings_field()}


@router.get("/v1/videos")
async def list_videos(
    request: Request,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """Lists the videos of the caller."""
    found, is_after, is_descending = deque[Job](maxlen=limit + 1), after is None, order == "desc"
    async with aclosing(_newest_first(await _models(request))) as jobs:
        async for job in jobs:
            if job.job_id == after:
                is_after = True
            elif is_after or not is_descending:
                found.append(job)
            # The oldest videos are the last that are found before `after`.
            if len(found) > limit if is_descending else job.job_id == after:
                break
    if not is_after:
        raise ParameterError("after", f"no video has the id {str(after)[:140]!r}; use the id of a listed video")
    data = [_to_object(job) for job in (found if is_descending else reversed(found))][:limit]
    return list_page(data, has_more=len(found) > limit)


@router.get("/v1/videos/{video_id}")
async def read_video(video_id: str, request: Request) -> dict[str, Any]:
    """Describes a video and its progress."""
    return _to_object((await _find(request, video_id)).job)


@router.api_route("/v1/videos/{video_id}/content", methods=["GET", "HEAD"])
async def read_content(video_id: str, request: Request, variant: str = _VIDEO) -> Response:
    """Returns the file of a video, or one range of it, while it is read from the store."""
    if variant != _VIDEO:
        raise ParameterError("variant", f"{variant[:40]!r} is not supported; use {_VIDEO!r}")
    model, job = await _find(request, video_id)
    if job.state != "succeeded":
        raise NotReadyError(f"the video {video_id} is {_STATUSES[job.state]}; read its content when it is completed")
    file = next(file for output in job.outputs for file in output.files)
    headers = {"Accept-Ranges": "bytes", "ETag": f'"{file.sha256.hex()}"'}
    begin, end, status = 0, file.size_bytes, 200
    wanted = request.headers.get("range", "")
    if wanted.startswith("bytes=") and request.headers.get("if-range") in {None, headers["ETag"]}:
        found = _find_range(wanted, file.size_bytes)
        if found is None:
            problem = f"it is not one range of the {file.size_bytes} bytes; send bytes=FIRST-LAST"
            response = error_response(ParameterError("Range", problem))
            response.status_code, response.headers["Content-Range"] = 416, f"bytes */{file.size_bytes}"
            return response
        (begin, end), status = found, 206
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{file.size_bytes}"
    headers["Content-Length"] = str(end - begin)
    if request.method == "HEAD":
        return Response(None, status, headers, file.media_type)
    return StreamingResponse(_read(model, file, begin, end), status, headers, file.media_type)


def _find_range(wanted: str, size_bytes: int) -> tuple[int, int] | None:
    """Returns the first byte and the end of a range, or None if the file lacks them or several ranges are wanted."""
    found = _RANGE.fullmatch(wanted)
    if found is None or not any(found.groups()):
        return None
    first, last = (int(each) if each else None for each in found.groups())
    begin = max(0, size_bytes - (last or 0)) if first is None else first
    end = size_bytes if first is None or last is None else min(last + 1, size_bytes)
    return (begin, end) if begin < end else None


async def _read(model: Model, file: MediaFile, begin: int, end: int) -> AsyncGenerator[bytes]:
    async with aclosing(stream_file(model.client, file, offset=begin)) as responses:
        async for response in responses:
            data, offset = response.media.data, response.media.offset
            if part := data[max(0, begin - offset) : max(0, end - offset)]:
                yield part
            if offset + len(data) >= end:
                return
    raise InvalidRequestError(f"{file.uri} ends before byte {end}; make the video again", reason="MEDIA_MISMATCH")


@router.delete("/v1/videos/{video_id}")
async def delete_video(video_id: str, request: Request) -> dict[str, Any]:
    """Deletes a video. Stops its job if it has not ended."""
    model, job = await _find(request, video_id)
    await model.client.jobs.delete(job.job_id)
    return {"id": job.job_id, "object": "video.deleted", "deleted": True}


async def _read_body(request: Request) -> tuple[VideoBody, Content]:
    if is_json(request):
        body = await read_json(request, VideoBody)
        return body, body.prompt
    form = await read_form(request, file=_IMAGE, min_files=0)
    body = validate(VideoBody, form.fields)
    return body, [*images_of(form, param=_IMAGE), body.prompt] if form.files else body.prompt


async def _models(request: Request) -> list[Model]:
    """Returns the models that run jobs."""
    return [model for model in await (await catalog_of(request)).models() if model.description.jobs_endpoint]


async def _newest_first(models: list[Model]) -> AsyncGenerator[Job]:
    """Yields the videos of models, the newest first. Reads the lists of their jobs page by page."""
    async with AsyncExitStack() as stack:
        lists = [await stack.enter_async_context(aclosing(model.client.jobs.list())) for model in models]
        newest = {jobs: job for jobs in lists if (job := await anext(jobs, None)) is not None}
        while newest:
            jobs = max(newest, key=lambda each: newest[each].created_s)
            if (job := newest.pop(jobs)).labels.get(_MARK) == _VIDEO:
                yield job
            if (job := await anext(jobs, None)) is not None:
                newest[jobs] = job


async def _find(request: Request, video_id: str) -> _Video:
    """Returns a video of the caller. Raises NotFoundError (UNKNOWN_JOB) if no model has it."""
    for model in await _models(request):
        try:
            job = await model.client.jobs.get(video_id)
        except NotFoundError:
            continue
        if job.labels.get(_MARK) == _VIDEO:
            return _Video(model, job)
    raise NotFoundError(
        f"no video has the id {video_id[:140]!r}; it never existed, was deleted or has expired; list your videos",
        reason="UNKNOWN_JOB",
    )


def _output_of(model: Model) -> str:
    outputs = (each.name for each in model.description.outputs if each.media_type.startswith("video/"))
    name = next(outputs, None)
    if name is None:
        raise ParameterError("model", f"the model {model.id!r} has no video output; use another model")
    return name


def _to_object(job: Job) -> dict[str, Any]:
    error = job.error
    failure = None
    if job.state == "cancelled":
        failure = {"code": "cancelled", "message": "the job was cancelled"}
    elif job.state == "failed" and error is not None:
        failure = {"code": error.reason.lower(), "message": error.message}
    return {
        "id": job.job_id,
        "object": _VIDEO,
        "model": job.labels.get("model"),
        "status": _STATUSES[job.state],
        "progress": int(100 * (job.fraction or 0.0)),
        "created_at": int(job.created_s),
        "completed_at": int(job.ended_s) if job.state == "succeeded" and job.ended_s else None,
        "expires_at": None if job.expires_s is None else int(job.expires_s),
        "prompt": job.labels.get("prompt"),
        "seconds": job.labels.get("seconds", ""),
        "size": job.labels.get("size", ""),
        "remixed_from_video_id": None,
        "error": failure,
    }
