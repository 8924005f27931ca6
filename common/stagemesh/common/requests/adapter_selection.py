"""The LoRA adapters that a request selects for a stage, as written in `Parameters.adapter`."""

import math
import re
from typing import NamedTuple

from stagemesh.common.errors import InvalidRequestError

_MAX_SCALE = 10
_FACTOR = re.compile(r"-?[0-9]{1,3}(\.[0-9]{1,17})?")


class SelectedAdapter(NamedTuple):
    """An adapter by its name, and the strength with which it is applied."""

    name: str
    scale: float = 1.0
    """The factor of the adapter's change. 1 is the strength with which the adapter was trained."""


def parse_adapters(text: str) -> tuple[SelectedAdapter, ...]:
    """Returns the adapters that a text selects, in its order, such as `style` or `style*0.8+light*0.3`.

    Names are separated by `+`. A name may be followed by `*` and a scale from -10 to 10. Empty if the text is empty.
    Raises InvalidRequestError if the text has another form, or selects an adapter twice.
    """
    if not text:
        return ()
    selected: dict[str, SelectedAdapter] = {}
    for part in text.split("+"):
        name, star, factor = part.partition("*")
        if not name or (star and not _FACTOR.fullmatch(factor)) or not math.fabs(float(factor or 1)) <= _MAX_SCALE:
            raise _invalid(text, f"{part[:140]!r} is not a name, or a name, '*' and a scale from -10 to 10")
        if name in selected:
            raise _invalid(text, f"{name[:140]!r} is selected twice")
        selected[name] = SelectedAdapter(name, float(factor) if star else 1.0)
    return tuple(selected.values())


def _invalid(text: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"adapter is {text[:140]!r}: {problem}; write for example style*0.8+light*0.3", reason="INVALID_ADAPTER"
    )
