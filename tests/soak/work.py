"""What a soak asks for, and who says what is wrong with what came of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.soak.delivery import Delivery, Flaws
from tests.soak.workload import Request


@dataclass(frozen=True)
class Work:
    """The requests, which come again and again, and their outputs."""

    requests: Sequence[Request]
    output_of: Mapping[str, str]
    """By stage, the output in which its client sees that it goes on."""
    units: Callable[[Request], Mapping[str, Sequence[bytes]]]
    """What each output must bring; nothing by output where that cannot be said before."""
    judge: Callable[[Delivery], Flaws] = Delivery.flaws
    """Is given all deliveries in the order in which they ended: those without a fault first."""
    timeout_s: float = 45.0
    """Of a request, which takes two seconds where nothing befalls it."""
