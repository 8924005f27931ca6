"""Forms (multipart/form-data) with one file."""

from typing import NamedTuple, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile

from stagemesh.common.errors import InvalidRequestError
from stagemesh.gateway.errors import ParameterError

B = TypeVar("B", bound=BaseModel)


class Form(NamedTuple):
    """The parts of a form: the fields by name, and the content of the file."""

    fields: dict[str, str]
    data: bytes

    def validate(self, body: type[B]) -> B:
        """Returns the fields as a body. Raises RequestValidationError, which names each wrong field."""
        try:
            return body.model_validate(self.fields)
        except ValidationError as exc:
            raise RequestValidationError(exc.errors()) from exc


async def read_form(request: Request, *, file: str, max_bytes: int) -> Form:
    """Reads a form with the file `file`. A name that ends with [] has this end removed.

    Raises InvalidRequestError if the body is not a form, or if the file is missing, empty, or larger than `max_bytes`.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise InvalidRequestError(f"the body is not a form; send multipart/form-data with the file {file!r}")
    fields = dict[str, str]()
    data: bytes | None = None
    async with request.form(max_files=1) as form:
        for key, value in form.multi_items():
            name = key.removesuffix("[]")
            if not isinstance(value, UploadFile):
                fields[name] = value
            elif name != file:
                raise ParameterError(name, "this parameter is not supported")
            elif (value.size or 0) > max_bytes:
                raise ParameterError(
                    file,
                    f"it has {value.size} bytes, and may have {max_bytes}; send a shorter or a compressed file",
                    reason="FILE_TOO_LARGE",
                )
            else:
                data = await value.read()
    if data is None:
        raise ParameterError(file, "it is missing; send it as a file")
    if not data:
        raise ParameterError(file, "it is empty", reason="INVALID_MEDIA")
    return Form(fields, data)
