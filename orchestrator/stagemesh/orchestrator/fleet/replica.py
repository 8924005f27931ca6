"""The orchestrator's view of one replica of a stage: its state and an estimate of its load."""

import math
import time
from collections.abc import Callable, Collection
from enum import Enum

from stagemesh.common.errors import NotReadyError, StagemeshError, UnavailableError
from stagemesh.common.notification import Notifier
from stagemesh.common.plugins.descriptors import differing_fields
from stagemesh.common.process.stage_process import ReplicaState
from stagemesh.common.wire.versions import check_version
from stagemesh.connectors.packets import ConsumerAddress
from stagemesh.orchestrator.fleet.membership import Member, find_refusal
from stagemesh.orchestrator.fleet.replica_client import ReplicaClient
from stagemesh.orchestrator.fleet.replica_loss import REPLICA_LOST
from stagemesh.pipeline import Pipeline
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.v1 import protocol_pb2, stage_pb2

MAX_DETAIL = 4096
MIN_MESSAGE_BYTES = 2 << 20
"""The size of the largest message that a replica must accept at least, in bytes."""
_SMOOTHING = 0.2
_FIRST_GUESS_S = 1.0
_REPORTING_LOAD = frozenset({ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.ASLEEP, ReplicaState.LOADING})


class Hold(Enum):
    """A reason why the orchestrator sends no new requests to a replica that reports READY.

    Each value is a pair: the rank of the reason, and the state that is shown for the replica instead of READY. If a
    replica has several holds, the hold with the lowest rank is shown.
    """

    LEAVING = (1, ReplicaState.DRAINING)
    """The replica is no longer a member."""
    RESERVED = (2, ReplicaState.DRAINING)
    """The replica is reserved for one request."""
    NO_CONNECTOR = (3, ReplicaState.FAILED)
    """The fixed connector of one of the replica's edges cannot work."""
    CONNECTOR_UNKNOWN = (4, ReplicaState.LOADING)
    """The fixed connector of one of the replica's edges has not been probed yet."""

    @property
    def shown_state(self) -> ReplicaState:
        """The state that is shown for a replica with this hold instead of READY."""
        return self.value[1]


_CONNECTOR_HOLDS = (Hold.NO_CONNECTOR, Hold.CONNECTOR_UNKNOWN)


class StepCost:
    """Estimates the time that one step of a stage takes, from the load reports of all replicas of the stage."""

    def __init__(self) -> None:
        self.seconds = _FIRST_GUESS_S
        self.known = False
        """Whether any load report contained an estimate of work. If False, `seconds` is an initial guess."""

    def learn(self, work_s: float, *, steps: int) -> None:
        """Updates the estimate from a load report: `steps` steps take `work_s` seconds. Ignores a report of 0."""
        if work_s <= 0 or steps <= 0:
            return
        measured_s = work_s / steps
        self.seconds += (_SMOOTHING if self.known else 1.0) * (measured_s - self.seconds)
        self.known = True


class LoadEstimate:
    """Estimates the remaining work of one replica.

    Between two load reports, the estimate decreases as time passes and increases with each request that is placed on
    the replica.
    """

    def __init__(self, cost: StepCost, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.running = 0
        """The number of requests that this orchestrator has placed on the replica and not yet released."""
        self.idle = Notifier()
        """A notifier that fires when `running` becomes 0 or the replica ends."""
        self.queued_s = 0.0
        """The work of the steps that wait for the engine, in seconds, according to the last load report."""
        self._cost = cost
        self._clock = clock
        self._reported_s = 0.0
        self._reported_at_s = 0.0
        self._unreported = 0
        self._report_number = 0

    @property
    def work_s(self) -> float:
        """The estimated remaining work, in seconds."""
        left_s = self._reported_s and max(0.0, self._reported_s - (self._clock() - self._reported_at_s))
        return left_s + self._unreported * self._cost.seconds

    @property
    def backlog_s(self) -> float:
        """The estimated time until a new request would be processed, in seconds.

        This is the remaining work plus the time of one step for each request that this orchestrator has placed on the
        replica. The addition corrects the engine's estimate, which includes little work for requests that still wait
        for their input.
        """
        return self.work_s + self.running * self._cost.seconds

    def report(self, work_s: float | None, *, steps: int, queued: int = 0) -> None:
        """Updates the estimate from a load report: `steps` steps remain and take `work_s` seconds.

        `work_s` is None if the engine does not estimate its work. `queued` of the steps wait for the engine. Each step
        counts as an equal part of the work.
        """
        if work_s is None:
            self._reported_s = steps * self._cost.seconds
        else:
            # An infinite or undefined value is not an estimate. It would corrupt the step cost of the whole stage.
            work_s = work_s if math.isfinite(work_s) else 0.0
            self._cost.learn(work_s, steps=steps)
            self._reported_s = work_s if self._cost.known else steps * self._cost.seconds
        self._reported_at_s = self._clock()
        self.queued_s = self._reported_s * queued / steps if steps else 0.0
        # The report contains at most `steps` of this orchestrator's requests. The others have not arrived yet.
        self._unreported = max(0, self.running - steps)
        self._report_number += 1

    def place(self) -> Callable[[], None]:
        """Adds one request to the load. Returns an idempotent function that removes the request from the load."""
        self.running += 1
        self._unreported += 1
        number, released = self._report_number, False

        def release() -> None:
            nonlocal released
            if released:
                return
            released = True
            self.running -= 1
            unreported = self._unreported - (number == self._report_number)
            self._unreported = max(0, min(unreported, self.running))
            if not self.running:
                self.idle.fire()

        return release


class Replica:
    """One replica of a stage, from the start of its process to the end of the process.

    A restarted process is represented by a new object.
    """

    def __init__(
        self,
        member: Member,
        client: ReplicaClient,
        *,
        on_change: Callable[[], None],
        cost: StepCost | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Creates a replica. `on_change` is called after each change of the replica's state or holds."""
        self.stage, self.endpoint, self.server_name = member.stage, member.endpoint, member.server_name
        self.name = member.name or member.endpoint
        self.client = client
        self.load = LoadEstimate(cost or StepCost(), clock=clock)
        self.incarnation = self.generation = self.host = self.zone = ""
        """The identity and location from the replica's first description. Empty until that description arrives."""
        self.protocol: protocol_pb2.Protocol | None = None
        """The wire versions and the software that the replica reported. None until it has described itself."""
        self.is_described = False
        """Whether at least one description of the replica has arrived."""
        self.is_refused = False
        """Whether the orchestrator refused the replica because of its last description."""
        self.last_report: stage_pb2.WatchLoadResponse | None = None
        """The replica's newest load report, or None if none has arrived."""
        self.adapters: frozenset[str] | None = None
        """The names of the adapters that the replica has reported as loaded, or None if no report has arrived."""
        self._reported_at_s = 0.0
        self._clock = clock
        self._on_change = on_change
        self._state = ReplicaState.UNREACHABLE
        self._detail = "not described yet"
        self._holds: dict[Hold, str] = {}
        self.died = False
        """Whether the replica's process is known to have terminated.

        If `end_cause` is set and this is False, the process is unreachable but may still be running.
        """
        self.end_cause: StagemeshError | None = None
        """The error that is the reason why the replica counts as ended, or None if the replica has not ended."""
        self._end_callbacks: dict[object, Callable[[StagemeshError], None]] = {}

    @property
    def address(self) -> ConsumerAddress:
        """The address at which other replicas send data to this replica."""
        return ConsumerAddress(self.name, self.endpoint, self.server_name)

    @property
    def max_message_bytes(self) -> int:
        """The size of the largest message that the replica accepts, in bytes."""
        if self.protocol is None or not self.protocol.HasField("max_message_bytes"):
            return MAX_MESSAGE_BYTES
        return min(MAX_MESSAGE_BYTES, self.protocol.max_message_bytes)

    @property
    def state(self) -> ReplicaState:
        """The state that the planner and operators see.

        This is the last reported state. If the replica reports READY but has a hold, this is the state of the hold.
        """
        if self._state is not ReplicaState.READY or not self._holds:
            return self._state
        return self._first_hold.shown_state

    @property
    def detail(self) -> str:
        """A human-readable explanation of the state, for example what the replica loads or why it failed."""
        return self._holds[self._first_hold] if self._holds else self._detail

    @property
    def can_connect(self) -> bool:
        """Whether the connectors of the replica's edges can be probed.

        This requires that the replica reports READY and is neither leaving nor reserved.
        """
        return self._state is ReplicaState.READY and self._holds.keys() <= set(_CONNECTOR_HOLDS)

    @property
    def may_return(self) -> bool:
        """Whether the replica may become ready again, or another process at its address, without an operator."""
        if Hold.LEAVING in self._holds:
            return False
        stopping = (ReplicaState.DRAINING, ReplicaState.FAILED)
        return self.end_cause is not None or self._state not in stopping

    @property
    def is_ending(self) -> bool:
        """Whether running steps must move to other replicas: the replica has ended, is being drained, or is leaving."""
        return self.end_cause is not None or self._state is ReplicaState.DRAINING or Hold.LEAVING in self._holds

    @property
    def running(self) -> int:
        """The number of requests that this orchestrator has placed on the replica and not yet released."""
        return self.load.running

    @property
    def report_age_s(self) -> float:
        """The time since `last_report` was received, in seconds."""
        return self._clock() - self._reported_at_s

    def record_load(self, report: stage_pb2.WatchLoadResponse) -> None:
        """Stores a load report for operators, and updates the load estimate for the planner."""
        self.last_report, self._reported_at_s = report, self._clock()
        work_s = report.work_s if report.HasField("work_s") else None
        self.load.report(work_s, steps=report.running + report.queued, queued=report.queued)
        adapters = frozenset(report.adapters)
        if adapters != self.adapters:
            self.adapters = adapters
            self._on_change()

    def on_end(self, callback: Callable[[StagemeshError], None]) -> Callable[[], object]:
        """Registers a callback for the replica's end, and returns a function that removes the callback.

        The callback receives the error that is the cause of the end. If the replica has already ended, the callback is
        called immediately.
        """
        key = object()
        if self.end_cause is not None:
            callback(self.end_cause)
        else:
            self._end_callbacks[key] = callback
        return lambda: self._end_callbacks.pop(key, None)

    def end(self, cause: StagemeshError, *, died: bool = True) -> None:
        """Marks the replica as ended, and passes `cause` to the registered callbacks. Idempotent.

        `died` is False if the process may still be running.
        """
        if self.end_cause is not None:
            return
        self.end_cause, self.died = cause, died
        callbacks, self._end_callbacks = self._end_callbacks, {}
        for callback in callbacks.values():
            callback(cause)
        self.load.idle.fire()

    def loss(self, event: str, *, reason: str = REPLICA_LOST) -> UnavailableError:
        """Returns the error for requests that ran on the replica before `event`.

        `event` is a verb phrase that completes the sentence "replica X …". `reason` is the machine-readable error
        reason.
        """
        return UnavailableError(
            f"replica {self.name} of stage {self.stage!r} at {self.endpoint} {event}; try again",
            reason=reason,
            metadata={"stage": self.stage, "replica": self.name},
            retry_after_s=1.0,
        )

    async def wait_until_idle(self) -> None:
        """Waits until the replica runs no request of this orchestrator, or until the replica ends."""
        while self.running and self.end_cause is None:
            await self.load.idle.wait()

    def leave(self, why: str) -> None:
        """Ends the replica's membership. The replica receives no new requests. Its running requests continue.

        `why` is shown to operators.
        """
        self._set_hold(Hold.LEAVING, why)

    def reserve(self, why: str) -> Callable[[], None]:
        """Reserves the replica for one request, so that no other requests are planned on it.

        Returns a function that ends the reservation. `why` is shown to operators.
        """
        self._set_hold(Hold.RESERVED, why)
        return lambda: self._set_hold(Hold.RESERVED, None)

    def hold_for_connector(self, hold: Hold | None, why: str = "") -> None:
        """Sets the replica's connector hold to NO_CONNECTOR or CONNECTOR_UNKNOWN, or removes it if `hold` is None.

        `why` is shown to operators.
        """
        for each in _CONNECTOR_HOLDS:
            self._set_hold(each, why if each is hold else None)

    def observe(self, state: ReplicaState, detail: str) -> None:
        """Sets the replica's state, which the replica has reported or the orchestrator has determined.

        `detail` is a human-readable explanation of the state, of which the first `MAX_DETAIL` characters are kept.
        """
        changed = state is not self._state
        self._state, self._detail = state, detail[:MAX_DETAIL]
        if changed:
            self._on_change()

    def doubt(self, cause: StagemeshError) -> None:
        """Sets the state to UNREACHABLE because a running step has lost the replica, which does not answer.

        The replica's watcher then asks for its state.
        """
        self.observe(ReplicaState.UNREACHABLE, cause.message)
        self.client.end_health_watch()

    async def observe_again(self, former: ReplicaState, *, timeout_s: float) -> None:
        """Asks the replica for its state, and sets it if the state is then still `former`.

        In any other state, only the fleet can determine whether the replica belongs to the pipeline and which process
        serves it.
        """
        described = await self.client.describe(timeout_s=timeout_s)
        if self.state is former and self.incarnation == described.incarnation:
            self.observe(ReplicaState(described.state), described.detail)

    def refuse(self, why: str) -> None:
        """Sets the replica's state to FAILED, because it must not run requests of this orchestrator."""
        self.is_refused = True
        self.observe(ReplicaState.FAILED, f"refused: {why}")

    def observe_description(
        self, description: stage_pb2.DescribeResponse, pipeline: Pipeline, *, generations: Collection[str] = ()
    ) -> None:
        """Updates the replica from its description.

        The state becomes FAILED if the replica has no wire version in common with this process, does not belong to its
        stage, the pipeline or one of the accepted generations, or reports another signature than the pipeline file.
        """
        if not self.is_described:
            self.is_described = True
            self.incarnation, self.generation = description.incarnation, description.generation
            self.host, self.zone = description.host, description.zone
            self.protocol = description.protocol
        try:
            check_version(description.protocol, peer=f"replica {self.name}", own_name="the orchestrator")
            refusal = find_refusal(description, stage=self.stage, pipeline=pipeline, generations=generations)
            refusal = refusal or self._signature_refusal(description, pipeline)
            if self.max_message_bytes < MIN_MESSAGE_BYTES:
                refusal = f"it accepts messages of {self.max_message_bytes} bytes; {MIN_MESSAGE_BYTES} are required"
        except NotReadyError as exc:
            refusal = exc.message
        if refusal:
            self.refuse(refusal)
        else:
            self.is_refused = False
            self.observe(ReplicaState(description.state), description.detail)

    def _signature_refusal(self, description: stage_pb2.DescribeResponse, pipeline: Pipeline) -> str:
        """Returns why the replica's signature is refused, or an empty string."""
        if not description.HasField("signature"):
            return ""
        stage = pipeline.stages[self.stage]
        fields = differing_fields(description.signature, stage.signature)
        if not fields:
            return ""
        remedy = "install the same versions of the engine and its functions everywhere"
        if description.generation != pipeline.generation:
            remedy = "an orchestrator of its own generation uses it"
        elif stage.is_external:
            remedy = "change what it reports in Describe, or the stage's `signature` in the file"
        return f"its signature differs from the pipeline file's in {', '.join(fields)}; {remedy}"

    @property
    def _first_hold(self) -> Hold:
        return next(hold for hold in Hold if hold in self._holds)

    def _set_hold(self, hold: Hold, why: str | None) -> None:
        if self._holds.get(hold) == why:
            return
        if why is None:
            del self._holds[hold]
        else:
            self._holds[hold] = why
        self._on_change()


def reported_load(replica: Replica) -> stage_pb2.WatchLoadResponse | None:
    """Returns the newest load report of a replica, or None if the replica does not report its load in its state."""
    return replica.last_report if replica.state in _REPORTING_LOAD else None
