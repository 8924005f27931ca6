"""The base class and the scalar types of the entries of a pipeline file."""

from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]*$", max_length=63)]
OptionName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$", max_length=63)]
OutputName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]*$", max_length=63)]
Count: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=1_000_000)]
Size: TypeAlias = Annotated[int, Field(strict=True, ge=1)]
Positive: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Number: TypeAlias = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag: TypeAlias = Annotated[bool, Field(strict=True)]


class Entry(BaseModel, frozen=True):
    """Base class for mappings in a pipeline file. Unknown keys are errors."""

    # Python code uses the names of fields. `checks.shape` accepts only the keys of the file.
    model_config = ConfigDict(extra="forbid", validate_by_name=True, validate_by_alias=True)
