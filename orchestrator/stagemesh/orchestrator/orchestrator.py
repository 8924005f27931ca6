"""Admits, plans and runs the requests of one pipeline. This module does not depend on gRPC."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial

from stagemesh.common.errors import CancelledRequestError, InternalError, StagemeshError
from stagemesh.common.requests.request_checks import read_options
from stagemesh.orchestrator.admission.admission import Admission
from stagemesh.orchestrator.admission.queue import AdmissionRequest
from stagemesh.orchestrator.fleet.fleet import Fleet
from stagemesh.orchestrator.planning.chunk_policies import set_chunk_policies
from stagemesh.orchestrator.planning.planner import LeastWork, Plan, Planner
from stagemesh.orchestrator.planning.replacement_replicas import ReplacementReplicas
from stagemesh.orchestrator.request.lifecycle import RequestLifecycle, RequestRegistry, fingerprint, unknown_request
from stagemesh.orchestrator.request.output_record import RequestRecord, is_taken_over, not_running
from stagemesh.orchestrator.request.parameters import parameters_of
from stagemesh.orchestrator.request.streamed_input import InputPlanes, StreamedInput
from stagemesh.orchestrator.request.timeline import History, Timeline, Totals
from stagemesh.orchestrator.request.validation import ValidRequest, validate
from stagemesh.orchestrator.session.registry import SessionRegistry
from stagemesh.orchestrator.session.turn_requests import TurnRequests
from stagemesh.orchestrator.spans import TraceContext, current_traceparent, is_sampled_by_caller
from stagemesh.pipeline import Pipeline
from stagemesh.v1 import orchestrator_pb2, request_pb2

_log = logging.getLogger(__name__)

_TICK_S = 0.25
# The part of a caller's time, and its maximum in seconds, that remains for the answer to a late request.
_ANSWER_SHARE, _ANSWER_S = 0.1, 0.5


class Orchestrator:
    """Runs the requests of one pipeline. Accepts requests only within `async with orchestrator.running():`."""

    def __init__(
        self,
        pipeline: Pipeline,
        fleet: Fleet,
        *,
        max_request_s: float,
        drain_s: float,
        max_kept_state_bytes: int = 256 << 20,
        choice: LeastWork | None = None,
        samples: Callable[[TraceContext], bool] = is_sampled_by_caller,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`samples` decides which requests are traced: by default those that the caller traces."""
        self._samples = samples
        self.pipeline = pipeline
        self.fleet = fleet
        self.admission = Admission(pipeline.limits, clock=clock)
        self.requests = RequestRegistry()
        self.sessions = SessionRegistry(pipeline, TurnRequests(pipeline, self.requests, self.start), clock=clock)
        self.totals = Totals()
        """Totals over the requests that have ended. Running requests are not included."""
        self.history = History()
        self.on_ended: list[Callable[[Timeline], None]] = []
        """The functions to call with the timeline of each request that has ended."""
        self._clock = clock
        self._planner = Planner(pipeline, fleet.registry, adapters=fleet.adapters, warm=fleet.warm, choice=choice)
        self._replacements = ReplacementReplicas(self._planner, max_kept_state_bytes=max_kept_state_bytes)
        self.input_planes = InputPlanes(pipeline.name)
        self._numbers = itertools.count(1)
        self.max_request_s, self._drain_s = max_request_s, drain_s
        self._group: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Accepts requests within the block.

        At the end of the block, rejects queued requests, and gives running requests `drain_s` seconds to finish. Then
        stops the remaining requests. Returns after every stage has released all requests.
        """
        async with AsyncExitStack() as stack:
            stack.callback(self.requests.clear)
            stack.push_async_callback(self.input_planes.close)
            self._group = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(self._group.create_task(self._watch_admission(), name="watch admission").cancel)
            await stack.enter_async_context(self.sessions.running())
            stack.push_async_callback(self._drain)
            yield

    async def generate(
        self, request: orchestrator_pb2.GenerateRequest, *, time_left_s: float | None
    ) -> AsyncGenerator[bytes]:
        """Returns an iterator over the events of a request, oldest first. Each event is a serialized GenerateResponse.

        If a request with the same id and content exists, attaches to this request. Otherwise starts a new request.
        Omits outputs before `request.next_positions`.

        `time_left_s` is the time until the caller's deadline in seconds, or None if the caller has no deadline.

        Start to iterate immediately, and iterate within `aclosing`. The request is stopped `request.linger_s` seconds
        after its last caller has disconnected.
        """
        valid = validate(request, self.pipeline)
        content = fingerprint(request)
        seed = request.parameters.seed if request.parameters.HasField("seed") else None
        find_known = partial(self.requests.find_same, valid.request_id, content, seed=seed)
        while (known := find_known()) is not None and known.record.abandoned:
            # The request is about to end, and no caller has received its result. A new request is therefore started.
            await asyncio.wait([known.ended])
        if known is None:
            known = self.start(valid, content=content, time_left_s=time_left_s)
        known.record.expect(linger_s=request.linger_s)
        positions = {(each.name, each.index): each.position for each in request.next_positions}
        return known.record.follow(next_positions=positions)

    def start(self, request: ValidRequest, *, content: bytes, time_left_s: float | None) -> RequestLifecycle:
        """Starts a request with a new id, and passes it to admission.

        Raises UnavailableError (NOT_RUNNING) if the orchestrator starts or stops. If admission rejects the request
        immediately, raises the error and does not store the request. The request is stopped if a caller has followed
        its record (`RequestLifecycle.record`) and the last one has left.

        - `content` is a digest of what the caller has requested. A later caller with the same id must have the same.
        - `time_left_s` is the time until the caller's deadline in seconds, or None if the caller has no deadline.
        """
        if self._group is None:
            raise not_running()
        timeout_s = self.max_request_s
        if time_left_s is not None:
            # The error of a late request says what it waits for, and must arrive before the caller stops waiting.
            timeout_s = min(timeout_s, time_left_s - min(_ANSWER_S, _ANSWER_SHARE * time_left_s))
        admission_request = _to_admission_request(request, deadline_s=self._clock() + timeout_s)
        timeline = Timeline(
            request.request_id,
            caller=request.caller,
            number=next(self._numbers),
            priority=request.priority,
            outputs=request.outputs,
            choices=request.choices,
            timeout_s=timeout_s,
            trace=self._trace(),
        )
        record = RequestRecord(timeline)
        known = RequestLifecycle(
            record,
            fingerprint=content,
            seed=request.seed,
            admission=self.admission,
            admission_request=admission_request,
            replacements=self._replacements,
            facts=request.facts,
            input_planes=self.input_planes,
            clock=self._clock,
        )
        record.stop_by(known.stop, max_unread_bytes=self.pipeline.limits.max_unread_bytes)
        self.requests.add(request.request_id, known)
        self._group.create_task(self._run(request, known), name=request.request_id)
        return known

    async def cancel(
        self, request_id: str, *, when_left: bool = False, may_act_for: Callable[[str], bool] = lambda _: True
    ) -> None:
        """Stops a request. Returns after every stage has released the request.

        If `when_left` is True, returns immediately, and the request is stopped when its last caller leaves. Raises
        NotFoundError (UNKNOWN_REQUEST) if the request is unknown, or if `may_act_for` returns False for its caller.
        """
        known = self.requests.find(request_id)
        if known is None or not may_act_for(known.caller):
            raise unknown_request(request_id)
        if when_left:
            known.record.dismiss()
            return
        known.stop(CancelledRequestError("the request was cancelled by CancelRequest"))
        await asyncio.wait([known.ended])

    def _trace(self) -> TraceContext | None:
        """Returns the trace of a request that the current RPC starts, or None if it is not traced."""
        trace = TraceContext.make(current_traceparent())
        return trace if self._samples(trace) else None

    def _plan(self, request: ValidRequest, runs: int) -> Sequence[Plan]:
        """Plans this number of runs of a request, all in one generation."""
        route = self.pipeline.route(request.outputs, request.facts)
        self.fleet.edge_connectors.check(route.edges)
        adapters = {stage.name: parameters_of(stage, request.parameters).adapter for stage in route.stages}
        selected = {stage: adapter for stage, adapter in adapters.items() if adapter}
        with ExitStack() as placed:
            plans, generation = list[Plan](), request.generation
            for _ in range(runs):
                plans.append(
                    self._planner.plan(
                        route,
                        adapters=selected,
                        generation=generation,
                        preferred=request.preferred,
                        insists=request.running_attempt is not None,
                    )
                )
                placed.callback(plans[-1].release)
                set_chunk_policies(plans[-1], request.parameters)
                generation = plans[-1].generation
            placed.pop_all()
        return plans

    async def _run(self, request: ValidRequest, known: RequestLifecycle) -> None:
        error: StagemeshError | None
        try:
            bytes_of = partial(_made_bytes, pipeline=self.pipeline, stream=request.stream)
            error = await known.run(request, partial(self._plan, request), bytes_of)
        except Exception:  # noqa: BLE001
            _log.exception("request %s failed unexpectedly", request.request_id)
            error = InternalError("the orchestrator failed; its log has the details")
        # This must precede the end of the record, because a client that sees the end must find everything released.
        record = known.record
        record.timeline.end(error)
        self.totals.add(record.timeline)
        self.history.add(record.timeline)
        for observe in self.on_ended:
            observe(record.timeline)
        # A caller that returns takes the request back if the other orchestrator has died, too.
        if known.has_run and not record.abandoned and not is_taken_over(error):
            self.requests.end(request.request_id)
        else:
            self.requests.forget(request.request_id)
        known.ended.set_result(None)
        record.close(error)

    async def _watch_admission(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.admission.tick()

    async def _drain(self) -> None:
        self._group = None
        self.admission.close(not_running())
        self.sessions.drain()
        running = [known.ended for known in self.requests.running]
        if not running:
            return
        _log.info("%d requests are still running; they have %.0f s to finish", len(running), self._drain_s)
        await asyncio.wait(running, timeout=self._drain_s)
        for known in self.requests.running:
            known.stop(not_running("the orchestrator stopped before the request finished; try again"))
        await asyncio.wait(running)


def _to_admission_request(request: ValidRequest, *, deadline_s: float) -> AdmissionRequest:
    """Converts a client's request to an admission request.

    The input size is known when the request arrives. The sizes of outputs and chunks are not known: admission reserves
    the average of earlier requests of the same kind. An average suffices, because the limits apply to the total over
    all requests. Engine memory is not estimated here, because each engine limits its own memory.

    Requests are of the same kind if they have the same outputs, options and number of choices, and if their input sizes
    and token limits have the same number of binary digits. The parameters of single stages count, too.
    """
    parameters, input_bytes = request.parameters, request.input.ByteSize()
    kind = (
        request.outputs,
        request.choices,
        input_bytes.bit_length(),
        _kind_of(parameters),
        tuple(sorted((name, _kind_of(given)) for name, given in parameters.stages.items())),
    )
    return AdmissionRequest(
        request_id=request.request_id,
        caller=request.caller,
        priority=request.priority,
        deadline_s=deadline_s,
        choices=request.choices,
        input_bytes=input_bytes,
        kind=kind,
    )


def _kind_of(parameters: request_pb2.Parameters | request_pb2.StageParameters) -> tuple[int, tuple[object, ...]]:
    options = sorted(read_options(parameters.options).items())
    return parameters.sampling.max_tokens.bit_length(), tuple(options)


def _made_bytes(record: RequestRecord, pipeline: Pipeline, stream: StreamedInput | None) -> int:
    """Returns the number of bytes that a request's outputs, its streamed input and the chunks of its edges occupied.

    The orchestrator retains all outputs of a request for callers that attach later. The chunks of an edge occupy at
    most the credit that the consumer has granted.
    """
    windows = {edge.name: pipeline.stages[edge.consumer].data_plane.window_bytes for edge in pipeline.edges}
    streamed_bytes = stream.size_bytes if stream is not None else 0
    return (
        record.size_bytes
        + streamed_bytes
        + sum(min(edge.size_bytes, windows.get(edge.edge, 0)) for edge in record.edges)
    )
