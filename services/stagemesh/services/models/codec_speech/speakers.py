"""Chooses the speaker of a request."""

from collections.abc import Mapping
from typing import TypeVar

from stagemesh.common.errors import InvalidRequestError

Properties = TypeVar("Properties")


def choose_speaker(speakers: Mapping[str, Properties], name: str) -> Properties:
    """Returns the properties of the speaker `name`, or of the first speaker if `name` is empty. Ignores case.

    Raises InvalidRequestError (INVALID_OPTION) if the model does not have the speaker.
    """
    known = {each.lower(): properties for each, properties in speakers.items()}
    chosen = name.lower() or next(iter(known))
    if chosen not in known:
        raise InvalidRequestError(
            f"the model has no speaker {name!r}; choose one of: {', '.join(sorted(known))}",
            reason="INVALID_OPTION",
            metadata={"option": "speaker"},
        )
    return known[chosen]
