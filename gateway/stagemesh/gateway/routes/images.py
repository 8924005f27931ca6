"""`/v1/images/generations` and `/v1/images/edits`: a prompt in, or images and a prompt, and images out, with previews
while they are made.
"""

import base64
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from stagemesh.client import AsyncResponseStream, Content, Event, GenerateArguments, Image, ImageFile
from stagemesh.common.errors import InternalError
from stagemesh.gateway import parameters
from stagemesh.gateway.answers import now_s, respond, sse
from stagemesh.gateway.body import MAX_ITEMS, Form, StageBody, option_values, read_form, read_json, validate
from stagemesh.gateway.catalog import Model, find_model
from stagemesh.gateway.content import check_kind
from stagemesh.gateway.errors import ParameterError

router = APIRouter()

_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})")
_MAX_FILES = 16
_OPTIONS = ("aspect_ratio", "num_inference_steps", "guidance_scale")
"""The parameters that are options of the pipeline's stages."""


class ImageBody(StageBody):
    """The body of a request for images. The size and the steps are options of the pipeline's stages."""

    rules = parameters.RULES["images"]

    prompt: Annotated[str, Field(min_length=1)]
    negative_prompt: str | None = None
    n: Annotated[int | None, Field(ge=1, le=MAX_ITEMS)] = None
    size: str | None = None
    aspect_ratio: str | None = None
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    stream: bool | None = None
    partial_images: Annotated[int | None, Field(ge=0, le=3)] = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None

    def arguments(self, model: Model) -> GenerateArguments:
        """Returns the arguments of the client for this request, without the prompt."""
        if self.partial_images and not self.stream:
            raise ParameterError("partial_images", "it needs stream: true")
        return self.stage_arguments(model) | {
            "outputs": [model.require_output("image")],
            "negative_prompt": self.negative_prompt,
            "choices": self.n or 1,
            "options": {
                **self.options,
                **size_options(self.size, model),
                **option_values(model, self, *_OPTIONS, *self._format(model)),
            },
        }

    def _format(self, model: Model) -> tuple[str, ...]:
        """Returns the parameter of the format if it is an option. Stages without the option usually make PNG."""
        return ("output_format",) if self.output_format != "png" or model.option("output_format") else ()

    def check_format(self, image: Image) -> None:
        """Raises InvalidRequestError if the pipeline makes images of another format."""
        made = image.media_type.removeprefix("image/")
        if self.output_format not in {None, made}:
            raise ParameterError("output_format", f"the model makes {made}; omit the parameter")


def size_options(size: str | None, model: Model) -> Mapping[str, int]:
    """Returns the options of a model for a size of the form WIDTHxHEIGHT. Empty if `size` is None or "auto".

    Raises InvalidRequestError if the size has another form, or if no stage of the model has the options.
    """
    if size is None or size == "auto":
        return {}
    found = _SIZE.fullmatch(size)
    if found is None:
        raise ParameterError("size", f"{size[:40]!r} is not of the form WIDTHxHEIGHT")
    width, height = (model.find_option(name, param="size") for name in ("width", "height"))
    return {width: int(found[1]), height: int(found[2])}


@router.post("/v1/images/generations")
async def create_image(request: Request) -> Response:
    """Makes images of a prompt."""
    body = await read_json(request, ImageBody)
    return await _answer(body, request, body.prompt)


@router.post("/v1/images/edits")
async def edit_image(request: Request) -> Response:
    """Makes images of images and a prompt. The body is a form with files."""
    form = await read_form(request, file="image", max_files=_MAX_FILES)
    body = validate(ImageBody, form.fields)
    return await _answer(body, request, [*images_of(form, param="image"), body.prompt])


def images_of(form: Form, *, param: str) -> list[ImageFile]:
    """Returns the files of a form as images. Raises ParameterError if the media type of one is of another kind."""
    for file in form.files:
        check_kind(file.media_type, "image", param)
    return [ImageFile(file.data, file.media_type) for file in form.files]


async def _answer(body: ImageBody, request: Request, prompt: Content) -> Response:
    model = await find_model(request, body.model)
    events = model.client.generate(prompt, **body.arguments(model))
    return await respond(
        request, events, streams=body.stream, chunks=partial(_stream, body), whole=partial(_whole, body)
    )


async def _whole(body: ImageBody, events: AsyncResponseStream) -> dict[str, Any]:
    result = await events.result()
    if not all(choice.images for choice in result.choices):
        raise InternalError("the pipeline ended without an image; the logs of its stages may say why")
    reports = (report for stages in result.finished.choices for report in stages.values())
    parameters.add_stage_warnings(warning.message for report in reports for warning in report.warnings)
    images = [image for choice in result.choices for images in choice.images.values() for image in images]
    for image in images:
        body.check_format(image)
    return {"created": now_s(), "data": [{"b64_json": base64.b64encode(each.data).decode()} for each in images]}


async def _stream(body: ImageBody, events: AsyncIterator[Event]) -> AsyncGenerator[bytes]:
    """Yields up to `partial_images` previews of each image, and the images."""
    shown = dict[int, int]()
    async for event in events:
        if not isinstance(event, Image):
            continue
        body.check_format(event)
        fields = {
            "b64_json": base64.b64encode(event.data).decode(),
            "created_at": now_s(),
            "output_format": event.media_type.removeprefix("image/"),
            "size": body.size or "auto",
            "quality": "auto",
            "background": "auto",
        }
        if not event.preview:
            kind = "image_generation.completed"
            yield sse({"type": kind, **fields}, event=kind)
        elif (number := shown.get(event.index, 0)) < (body.partial_images or 0):
            shown[event.index] = number + 1
            kind = "image_generation.partial_image"
            yield sse({"type": kind, "partial_image_index": number, **fields}, event=kind)
