"""The requests of a soak, and the judge of their deliveries."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.soak.delivery import Delivery, Flaws
from tests.soak.workload import Request


@dataclass(frozen=True)
class Work:
    """The requests of a soak, which are repeated, and their expected outputs."""

    requests: Sequence[Request]
    output_of: Mapping[str, str]
    """The output in which a client sees that the stage continues, by stage."""
    units: Callable[[Request], Mapping[str, Sequence[bytes]]]
    """The expected units of each output. An output whose units are not known in advance has none."""
    delivery: Callable[[Request, Mapping[str, Sequence[bytes]]], Delivery] = Delivery
    """Creates the record of a request from the request and its expected units."""
    judge: Callable[[Delivery], Flaws] = Delivery.flaws
    """Judges all deliveries, in the order in which they ended. Those without a fault come first."""
    timeout_s: float = 45.0
    """The time limit of a request in seconds. A request takes two seconds without a fault."""
