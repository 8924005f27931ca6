"""What a request has made so far, kept for every caller that attaches to it."""

import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing

from stagemesh.connectors.errors import StagemeshError
from stagemesh.orchestrator.timeline import Timeline
from stagemesh.services.serving.journal import Journal
from stagemesh.v1 import orchestrator_pb2, request_pb2, stage_pb2


class RequestRecord:
    """The merged events of a request: where it stands while it waits, then admitted, outputs numbered by name, and
    finished last.
    """

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.timeline = timeline or Timeline()
        self.journal: Journal[orchestrator_pb2.GenerateResponse] = Journal()
        self.size_bytes = 0
        self._began_s = time.monotonic()
        self._started_s: float | None = None
        self._first_output_s: float | None = None
        self._next_seqs = Counter[str]()
        self._finished: dict[str, stage_pb2.StepFinished] = {}

    def add_admitted(self, *, request_id: str, seed: int, replicas: Mapping[str, str]) -> None:
        """The request is planned and runs."""
        admitted = orchestrator_pb2.RequestAdmitted(request_id=request_id, seed=seed, replicas=replicas)
        self._append(orchestrator_pb2.GenerateResponse(admitted=admitted))

    def add_queued(self, *, request_id: str, position: int, expected_wait_s: float) -> None:
        """The request waits to be admitted."""
        queued = orchestrator_pb2.RequestQueued(
            request_id=request_id, position=position, expected_wait_s=expected_wait_s
        )
        self._append(orchestrator_pb2.GenerateResponse(queued=queued))

    def add_progress(self, stage: str, progress: stage_pb2.StepProgress) -> None:
        """A stage got on."""
        event = orchestrator_pb2.RequestProgress(stage=stage, progress=progress)
        self._append(orchestrator_pb2.GenerateResponse(progress=event))

    def add_output(self, name: str, output: request_pb2.Output) -> None:
        """A piece of the pipeline's output `name`; one that nobody asked for ("") is dropped."""
        if not name:
            return
        if self._first_output_s is None:
            self._first_output_s = self._elapsed_s()
        event = orchestrator_pb2.GenerateResponse(output=output)
        event.output.name, event.output.seq = name, self._next_seqs[name]
        self._next_seqs[name] += 1
        self._append(event)

    def note_started(self) -> None:
        """A stage has taken the request."""
        if self._started_s is None:
            self._started_s = self._elapsed_s()

    def note_finished(self, stage: str, finished: stage_pb2.StepFinished) -> None:
        """A stage is done."""
        self._finished[stage] = finished

    @property
    def edges(self) -> Iterator[request_pb2.EdgeUsage]:
        """What crossed the edges of the stages that are done."""
        return (edge for finished in self._finished.values() for edge in finished.edges)

    def has_finished(self, stage: str) -> bool:
        """Whether the stage is done."""
        return stage in self._finished

    def finish(self) -> None:
        """The request succeeded: says so and ends all readers."""
        timings = request_pb2.Timings(
            started_s=self._started_s or 0.0, first_output_s=self._first_output_s, finished_s=self._elapsed_s()
        )
        finished = orchestrator_pb2.RequestFinished(stages=self._finished, timings=timings)
        self._append(orchestrator_pb2.GenerateResponse(finished=finished))
        self.journal.close()

    def close(self, error: StagemeshError) -> None:
        """The request failed: ends all readers with the cause. Closing twice is harmless."""
        self.journal.close(error)

    async def follow(self, *, next_seqs: Mapping[str, int]) -> AsyncGenerator[orchestrator_pb2.GenerateResponse]:
        """The events from the first one, without the outputs that the caller has; iterate within `aclosing`."""
        async with aclosing(self.journal.follow()) as events:
            async for event in events:
                if event.WhichOneof("event") != "output" or event.output.seq >= next_seqs.get(event.output.name, 0):
                    yield event

    def _append(self, event: orchestrator_pb2.GenerateResponse) -> None:
        # A stage that is told to stop may still have sent something.
        if not self.journal.closed:
            self.size_bytes += event.ByteSize()
            self.journal.append(event)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s
