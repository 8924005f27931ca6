"""Simulated clients that arrive at random times and retry after the delay that admission returns, in virtual time."""

import random
from dataclasses import dataclass, field
from functools import partial

from stagemesh.common.errors import OverloadedError
from stagemesh.orchestrator.admission.queue import AdmissionRequest
from tests.orchestrator.admission.driver import AdmissionDriver, Agenda, RecordedRequest


@dataclass
class SimulatedRequest:
    """One client's request. Times are on the driver's clock."""

    recorded: RecordedRequest
    took_s: float
    came_s: float
    delay_s: float | None = None
    """The retry delay of the first rejection, in seconds."""
    in_s: float | None = None
    """The time at which the request was queued or admitted."""
    began_s: float | None = None


@dataclass
class SimulatedClients:
    """Clients with short and long requests. The fraction `retrying` of the rejected ones retries."""

    driver: AdmissionDriver
    seed: int
    arrivals_a_second: float
    retrying: float = 1.0
    requests: list[SimulatedRequest] = field(default_factory=list[SimulatedRequest])

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._agenda = Agenda(self.driver.clock)

    @property
    def refused(self) -> list[SimulatedRequest]:
        """The requests that were rejected first and accepted later."""
        return [each for each in self.requests if each.delay_s is not None and each.in_s is not None]

    @property
    def queued(self) -> list[SimulatedRequest]:
        """The requests that waited in the queue and then ran."""
        return [each for each in self.requests if each.recorded.waits_s and each.began_s is not None]

    def run(self, *, for_s: float) -> None:
        """Sends requests for `for_s` seconds, and then waits until all are served."""
        at_s = 0.0
        while (at_s := at_s + self._random.expovariate(self.arrivals_a_second)) < for_s:
            recorded = RecordedRequest(AdmissionRequest(f"v{len(self.requests)}"))
            simulated = SimulatedRequest(recorded, self._duration_s(), at_s)
            recorded.on_admitted = partial(self._begin, simulated)
            self.requests.append(simulated)
            self._agenda.add(at_s, partial(self._arrive, simulated))
        self._agenda.run(until_s=for_s * 100)

    def _duration_s(self) -> float:
        return self._random.expovariate(1 / (0.5 if self._random.random() < 0.8 else 8.0))

    def _arrive(self, simulated: SimulatedRequest) -> None:
        try:
            simulated.recorded.entry = self.driver.admission.enter(simulated.recorded.request, simulated.recorded)
        except OverloadedError as exc:
            again_s = exc.retry_after_s or 0.0
            if simulated.delay_s is None:
                simulated.delay_s = again_s
                if self._random.random() >= self.retrying:
                    return
            self._agenda.add(again_s, partial(self._arrive, simulated))
        else:
            simulated.in_s = self.driver.clock.now_s

    def _begin(self, simulated: SimulatedRequest) -> None:
        simulated.began_s = self.driver.clock.now_s
        self._agenda.add(simulated.took_s, partial(self.driver.end, simulated.recorded))
