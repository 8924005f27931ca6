"""Unions of types whose errors are about the one type that was meant."""

from collections.abc import Mapping

from pydantic import BaseModel, Discriminator, Tag

from stagemesh.gateway.errors import TAG

TEXT, LIST, OBJECT, FLAG, NUMBER = (Tag(f"{TAG}{name}>") for name in ("text", "list", "object", "flag", "number"))
"""The tags of a union's types, by which `by_type` chooses."""
_TAGS: Mapping[type, Tag] = {str: TEXT, list: LIST, dict: OBJECT, bool: FLAG, int: NUMBER, float: NUMBER}


def by_type(expected: str) -> Discriminator:
    """Returns the discriminator of a union whose types have tags.

    `expected` describes the types in the error for a value of another type.
    """
    return Discriminator(_json_type, custom_error_type="wrong_type", custom_error_message=f"Input should be {expected}")


def _json_type(value: object) -> str | None:
    """Returns the tag of a value's type in JSON, or None for null."""
    tag = OBJECT if isinstance(value, BaseModel) else _TAGS.get(type(value))
    return None if tag is None else tag.tag
