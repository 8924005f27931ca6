"""Clients that come to an admission by chance, in virtual time, and come back when they are told to."""

import random
from dataclasses import dataclass, field
from functools import partial

from stagemesh.common.errors import OverloadedError
from stagemesh.orchestrator.admission import AdmissionRequest
from tests.orchestrator.admission.doors import Agenda, Asked, Door


@dataclass
class Visit:
    """One client's way in; times by the clock."""

    asked: Asked
    took_s: float
    came_s: float
    told_s: float | None = None
    """When the first refusal told it to come back: in so many seconds."""
    in_s: float | None = None
    """When it found a place, to wait or to run."""
    began_s: float | None = None


@dataclass
class Crowd:
    """Clients with short and long requests; of those who are refused a part `come_back`."""

    door: Door
    seed: int
    arrivals_a_second: float
    come_back: float = 1.0
    visits: list[Visit] = field(default_factory=list[Visit])

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._agenda = Agenda(self.door.clock)

    @property
    def refused(self) -> list[Visit]:
        """Those who were refused at first and got in later."""
        return [visit for visit in self.visits if visit.told_s is not None and visit.in_s is not None]

    @property
    def queued(self) -> list[Visit]:
        """Those who waited in the queue, and ran."""
        return [visit for visit in self.visits if visit.asked.waits_s and visit.began_s is not None]

    def run(self, *, for_s: float) -> None:
        """Lets them come for so long, and then waits until all are served."""
        at_s = 0.0
        while (at_s := at_s + self._random.expovariate(self.arrivals_a_second)) < for_s:
            visit = Visit(Asked(AdmissionRequest(f"v{len(self.visits)}")), self._duration_s(), at_s)
            visit.asked.on_admitted = partial(self._begin, visit)
            self.visits.append(visit)
            self._agenda.add(at_s, partial(self._come, visit))
        self._agenda.run(until_s=for_s * 100)

    def _duration_s(self) -> float:
        return self._random.expovariate(1 / (0.5 if self._random.random() < 0.8 else 8.0))

    def _come(self, visit: Visit) -> None:
        now_s = self.door.clock.now_s
        try:
            visit.asked.ticket = self.door.admission.enter(visit.asked.claim, visit.asked)
        except OverloadedError as exc:
            again_s = exc.retry_after_s or 0.0
            if visit.told_s is None:
                visit.told_s = again_s
                if self._random.random() >= self.come_back:
                    return
            self._agenda.add(again_s, partial(self._come, visit))
        else:
            visit.in_s = now_s

    def _begin(self, visit: Visit) -> None:
        visit.began_s = self.door.clock.now_s
        self._agenda.add(visit.took_s, partial(self._end, visit))

    def _end(self, visit: Visit) -> None:
        self.door.end(visit.asked)
