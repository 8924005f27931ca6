"""A model of one request: its stages, two orchestrators and a client as immutable states, and the moves between them.

The modules `recovery`, `failures`, `validation` and `lifecycle` decide what the orchestrators do.
"""

from collections.abc import Iterator
from functools import lru_cache

from stagemesh.common import errors
from stagemesh.common.errors import StagemeshError
from stagemesh.orchestrator.request import lifecycle, output_record, recovery, validation
from stagemesh.orchestrator.request.failures import NOT_REBOUND, Failure
from stagemesh.orchestrator.request.recovery import ActionKind, AttemptState, Phase
from stagemesh.orchestrator.request.step_calls import may_continue
from stagemesh.pipeline import Route
from tools.recovery_model.replicas import Call, End, Flow, Process, Rebinding, Replicas, Step, ViolationError, put
from tools.recovery_model.states import TENSOR, Attempt, Late, Move, Run, World, state_of

_SENT = -1
_LEFT = errors.CancelledRequestError("the client disconnected", reason=output_record.CALLER_DISCONNECTED)
_CANCELLED = errors.CancelledRequestError("it was cancelled")
_LOST = errors.UnavailableError("a replica is lost", reason="PEER_LOST")
_REPLACED = errors.StaleAttemptError("another attempt has taken over")
_BROKEN = errors.UnavailableError("the call broke", reason=NOT_REBOUND)


class Model(Replicas):
    """The moves of a request."""

    def __init__(self, route: Route, *, rows: int = 2, replicas: int = 1, checkpoints: bool = True) -> None:
        super().__init__(route, rows=rows, replicas=replicas)
        self.checkpoints, self._act = checkpoints, lru_cache(maxsize=1 << 16)(self._after_actions)

    def begin(self, *, crashes: int, faults: int) -> World:
        """Returns the state before the client's first call."""
        return World((Process(),) * (len(self.names) * self.replicas), crashes=crashes, faults=faults)

    def next(self, world: World) -> Iterator[Move]:
        """Yields what may happen without a fault. Time limits end only if nothing else can happen."""
        moves = list(self._moves(world)) or self._timeouts(world)
        yield from ((move, self._acted(then)) for move, then in moves)

    def faults(self, world: World) -> Iterator[Move]:
        """Yields all faults that the state still allows."""
        if not world.client.is_done:
            yield from ((move, self._acted(then)) for move, then in self._faults(world))

    def _acted(self, world: World) -> World:
        """Lets orchestrators act that wait for nothing, and drops late calls that can have no effect."""
        for o, run in enumerate(world.runs):
            if run is not None and not (run.lost or run.fresh):
                world = self._turn(world, o)
        attempts = ((each, each[1] if isinstance(each[1], int) else each[1].attempt) for each in world.late)
        late = (each for each, attempt in attempts if world.processes[each[0]].highest <= attempt)
        return world._replace(late=frozenset(late) if world.faults else frozenset())

    def _turn(self, world: World, o: int) -> World:
        run, cancels = self._act(world.at(o))
        return world.put(o, run)._replace(late=world.late | cancels)

    def _moves(self, world: World) -> Iterator[Move]:
        yield from self._client_moves(world)
        yield from ((move, world._replace(processes=then)) for move, then in self.moves(world.processes))
        for o, run in enumerate(world.runs):
            if run is not None and not run.end:
                yield from self._run_moves(world, o, run)

    def _client_moves(self, world: World) -> Iterator[Move]:
        client = world.client
        if client.follows is None:
            o = client.calls % 2
            run = world.runs[o]
            run = self._new_run(world) if run is None else run._replace(has_reader=True)
            yield f"the client calls {o}", world.put(o, run)._replace(client=client._replace(follows=o))
            return
        run = world.at(client.follows)
        if run.end not in ("", "finished"):
            raise ViolationError(f"the request fails: {run.end}")
        if run.end and run.rows != self.rows:
            raise ViolationError("the output is not complete")
        heard = client._replace(admitted=client.calls, is_done=bool(run.end))
        if heard != client:
            yield "the client reads", world._replace(client=heard)

    def _new_run(self, world: World) -> Run:
        client, known = world.client, tuple(process.incarnation for process in world.processes)
        running = None if client.admitted is None else validation.first_attempt(client.admitted)
        mode = "first" if running is None else "continue"
        return self._planned(Run(validation.first_attempt(client.calls), running, known, mode))

    def _planned(self, run: Run) -> Run:
        """Returns a run whose stages have their first attempts."""
        attempt, numbers = run.running or run.first, range(len(self.names))
        stages = tuple(Attempt(attempt, incarnation=run.known[self.place(i, attempt)]) for i in numbers)
        run = run._replace(stages=stages, lost=frozenset(), fresh=frozenset())
        for i in numbers if run.running is not None else ():
            run = self._start(run, i)
        return run

    # -- orchestrators

    def states(self, run: Run) -> dict[str, AttemptState]:
        return {name: state_of(*stage[:5]) for name, stage in zip(self.names, run.stages, strict=True)}

    def _run_moves(self, world: World, o: int, run: Run) -> Iterator[Move]:
        if run.lost or run.fresh:
            yield f"{o} restarts what is lost", self._turn(world, o)
        for p, process in enumerate(world.processes):
            if run.known[p] != process.incarnation:
                yield f"{o} notices the crash of process {p}", self._notice(world, o, p)
        for i, (name, stage) in enumerate(zip(self.names, run.stages, strict=True)):
            if stage.follows == _SENT:
                yield f"{o}: {name} starts or attaches", self._call(world, o, i)
            elif (then := self._event(world, o, i)) is not None:
                yield f"{o} receives an event of {name}", then
            if stage.rebinding is not None:
                yield f"{o} rebinds {name}", self._rebind(world, o, i)
        if not run.has_reader:
            yield f"{o} stops, because its client has left", self._cancel(world, o, _LEFT).put(o, None)

    def _after_actions(self, run: Run) -> tuple[Run, frozenset[Late]]:
        """Restarts stages and starts all actions that are possible, as the loop of `RequestRun` does."""
        cancels = frozenset[Late]()
        while not run.end:
            before = run
            for name in recovery.find_superfluous(self.route, self.states(run)):
                run = run.put(self.names.index(name), phase=Phase.FINISHED)
            if run.lost or run.fresh:
                run = self._restarted(run)
            for action in recovery.next_actions(self.route, self.states(run)):
                i = self.names.index(action.stage)
                stage = run.stages[i]
                if action.kind is ActionKind.PLACE:
                    run = run.put(i, phase=Phase.PLACED, incarnation=run.known[self.place(i, stage.attempt)])
                elif action.kind is ActionKind.START:
                    cancels |= {(self.place(i, each), each, False) for each in stage.superseded}
                    run = self._start(run, i)
                elif stage.rebinding is None:
                    run = run.put(i, rebinding=self._rebinding(run, i, action.edges))
            if all(stage.phase is Phase.FINISHED for stage in run.stages):
                run = run._replace(end="finished")
            if run == before:
                break
        return run, cancels

    def _restarted(self, run: Run) -> Run:
        states = self.states(run)
        found = recovery.plan_restarts(self.route, states, lost=run.lost, fresh=run.fresh, first_attempt=run.first)
        for i, name in enumerate(self.names):
            if name in found.void:
                run = run.put(i, checkpoint=None)
            stage, restart = run.stages[i], found.restarted.get(name)
            if name in found.unneeded:
                run = run.put(i, phase=Phase.FINISHED)
            elif restart is not None:
                is_old = stage.phase in (Phase.STARTING, Phase.RUNNING, Phase.FINISHED)
                superseded = (*stage.superseded, stage.attempt) if is_old else stage.superseded
                point = stage.checkpoint if restart.resumes else None
                new = Attempt(restart.attempt, Phase.UNPLACED, (), point or 0, point, point is not None)
                run = run._replace(stages=put(run.stages, i, new._replace(superseded=superseded)))
        return run._replace(lost=frozenset(), fresh=frozenset())

    def _flow(self, run: Run, i: int, e: int) -> Flow:
        other = sum(self.ends[e]) - i
        return self.place(other, run.stages[other].attempt), recovery.attempt_of(self.route.edges[e], self.states(run))

    def _start(self, run: Run, i: int) -> Run:
        stage, states = run.stages[i], self.states(run)
        flows = list[Flow | None]()
        for e, (each, ends) in enumerate(zip(self.route.edges, self.ends, strict=True)):
            is_bound = ends[1] == i or (ends[0] == i and recovery.is_open(each, states))
            flows.append(self._flow(run, i, e) if is_bound else None)
        bound = tuple((each.name, flow[1]) for each, flow in zip(self.route.edges, flows, strict=True) if flow)
        call = Call(stage.attempt, stage.first_row, tuple(flows))
        return run.put(i, phase=Phase.STARTING, bound=bound, call=call, follows=_SENT, superseded=())

    def _rebinding(self, run: Run, i: int, edges: tuple[str, ...]) -> Rebinding:
        numbers = [e for e, each in enumerate(self.route.edges) if each.name in edges]
        rows = [run.stages[self.ends[e][0]].first_row if self.ends[e][1] == i else 0 for e in numbers]
        ends = [(e, End(*self._flow(run, i, e)), row) for e, row in zip(numbers, rows, strict=True)]
        return Rebinding(run.stages[i].attempt, tuple(ends))

    def _notice(self, world: World, o: int, p: int) -> World:
        run, i = world.at(o), p // self.replicas
        stage, incarnation = run.stages[i], world.processes[p].incarnation
        world = world.put(o, run._replace(known=put(run.known, p, incarnation)))
        if self.place(i, stage.attempt) != p or stage.incarnation in (0, incarnation):
            return world
        is_needed = any(recovery.is_open(each, self.states(run)) for each in self.route.outgoing[self.names[i]])
        if stage.rebound and stage.phase is Phase.FINISHED and is_needed:
            return world.put(o, world.at(o)._replace(fresh=run.fresh | {self.names[i]}))
        return self._failed(world, o, i, _LOST)

    def _call(self, world: World, o: int, i: int) -> World:
        """Delivers the call of a step to its process, with its answer."""
        run, stage = world.at(o), world.at(o).stages[i]
        assert stage.call is not None, "it was sent"
        p, attach_only = self.place(i, stage.attempt), stage.attempt == run.running or stage.events > 0
        lowest = run.first if stage.attempt == run.running else 0
        try:
            processes = self.execute(world.processes, p, stage.call, attach_only=attach_only, lowest=lowest)
        except StagemeshError as exc:
            return self._failed(world, o, i, exc)
        run = run.put(i, follows=processes[p].incarnation)
        if not stage.events:
            run = self._take_accepted(run, i, processes[p].step)
        return world.put(o, run)._replace(processes=processes)

    def _take_accepted(self, run: Run, i: int, step: Step | None) -> Run:
        """Returns the run after the acceptance of a step, which reports the attempts of the step's flows."""
        ends = step.ends if step is not None else ()
        bound = {each.name: end.attempt for each, end in zip(self.route.edges, ends, strict=True) if end}
        for each in recovery.find_overtaken(self.route, self.states(run), self.names[i], bound):
            run = run.put(i, bound=tuple((dict(run.stages[i].bound) | {each.name: bound[each.name]}).items()))
            other = each.producer if each.consumer == self.names[i] else each.consumer
            if run.stages[self.names.index(other)].phase is not Phase.FINISHED:
                run = run._replace(lost=run.lost | {other})
            elif other == each.producer:
                run = run._replace(fresh=run.fresh | {other})
        return run

    def _event(self, world: World, o: int, i: int) -> World | None:
        """Delivers the next event of a step. Returns None if there is none."""
        run, stage = world.at(o), world.at(o).stages[i]
        process = world.processes[self.place(i, stage.attempt)]
        step = process.step
        if stage.follows != process.incarnation:
            return None
        if step is None or step.call.attempt != stage.attempt:
            return self._failed(world, o, i, _REPLACED)
        run = run.put(i, events=stage.events + 1)
        if not stage.events:
            run = run.put(i, phase=Phase.RUNNING if stage.phase is Phase.STARTING else stage.phase)
        elif stage.events <= step.made - step.call.begins:
            run = self._row_shown(run, i, step.call.begins + stage.events)
        elif step.end == "finished":
            run = run.put(i, phase=Phase.FINISHED, follows=0)
        elif step.end:
            return self._failed(world, o, i, _LOST if step.end == "failed" else _CANCELLED)
        else:
            return None
        return world.put(o, run)

    def _row_shown(self, run: Run, i: int, count: int) -> Run:
        """Returns the run after the event of a row. `count` is the number of rows up to this one."""
        if count != run.stages[i].first_row + run.stages[i].events - 1:
            raise ViolationError("an output is out of order")
        if i == len(self.names) - 1:
            if count > run.rows + 1:
                raise ViolationError("the output leaves out a row")
            run = run._replace(rows=max(run.rows, count))
        rows = {TENSOR: count}
        useful = self.checkpoints and recovery.is_checkpoint_useful(self.route, self.states(run), self.names[i], rows)
        return run.put(i, checkpoint=count) if useful else run

    def _failed(self, world: World, o: int, i: int, error: StagemeshError) -> World:
        """Applies the failure of a stage's newest attempt, as `Failures.add` does."""
        run, name = world.at(o).put(i, follows=0), self.names[i]
        world = world.put(o, run)
        if run.stages[i].phase is Phase.FINISHED or name in run.lost:
            return world
        if Failure(name, error).is_recoverable or (error is _CANCELLED and run.lost | run.fresh):
            return world.put(o, run._replace(lost=run.lost | {name}))
        return self._ended(world, o, error)

    def _ended(self, world: World, o: int, error: StagemeshError) -> World:
        """Ends the run of a request with an error. The request runs again if `RequestLifecycle` decides so."""
        run = world.at(o)
        world, latest = self._cancel(world, o, error), lifecycle.latest_attempt(error)
        if run.mode == "continue":
            again = run._replace(first=run.first + lifecycle.MOST_RESTARTS, running=None, mode="first")
        elif run.mode == "first" and latest is not None and run.has_reader and not run.rows:
            again = run._replace(first=latest + lifecycle.MOST_RESTARTS, running=None, mode="again")
        elif output_record.is_taken_over(error):
            return self._left(world.put(o, None), o)
        else:
            return world.put(o, run._replace(end=error.reason or error.message))
        return world.put(o, self._planned(again))

    def _cancel(self, world: World, o: int, error: StagemeshError) -> World:
        """Sends CancelStep for all attempts of a run that ends with an error."""
        calls = set[Late]()
        for i, stage in enumerate(world.at(o).stages):
            running = [stage.attempt] if stage.phase in (Phase.STARTING, Phase.RUNNING) else []
            calls |= {(self.place(i, each), each, may_continue(error)) for each in (*running, *stage.superseded)}
        return world._replace(late=world.late | calls)

    def _rebind(
        self, world: World, o: int, i: int, *, arrives: bool = True, answers: bool = True, keeps: bool = True
    ) -> World:
        """Delivers a rebinding to its process, and the answer to the orchestrator."""
        stage, processes = world.at(o).stages[i], world.processes
        run, rebinding = world.at(o).put(i, rebinding=None), stage.rebinding
        assert rebinding is not None, "it was sent"
        producers = {self.ends[e][0] for e, *_ in rebinding.ends}
        try:
            if arrives:
                processes = self.rebind(processes, self.place(i, stage.attempt), rebinding, keeps=keeps)
            if not answers:
                raise _BROKEN
        except StagemeshError as exc:
            resumed = {self.names[k] for k in producers if run.stages[k].resumed}
            if output_record.is_taken_over(exc):
                return self._ended(world.put(o, run), o, exc)
            if i in producers:
                run = run._replace(fresh=run.fresh | {self.names[i]})
            elif isinstance(exc, errors.NotReadyError) and resumed:
                run = run._replace(fresh=run.fresh | resumed)
            elif stage.phase is not Phase.FINISHED:
                run = run._replace(lost=run.lost | {self.names[i]})
        else:
            bound = {self.route.edges[e].name: end.attempt for e, end, _ in rebinding.ends}
            rebound = stage.rebound or i in producers
            run = run.put(i, bound=tuple((dict(stage.bound) | bound).items()), rebound=rebound)
        return world.put(o, run)._replace(processes=processes)

    # -- time and faults

    def _is_called(self, world: World, p: int, *, is_answered: bool) -> bool:
        """Returns whether an orchestrator follows the step of a process, or calls it if `is_answered` is False."""
        step, incarnation = world.processes[p].step, world.processes[p].incarnation
        stages = [run.stages[p // self.replicas] for run in world.runs if run is not None and not run.end]
        wanted = (incarnation,) if is_answered else (incarnation, _SENT)
        return any(step and step.call.attempt == each.attempt and each.follows in wanted for each in stages)

    def _timeouts(self, world: World) -> Iterator[Move]:
        """Yields what happens after some seconds without anything else."""
        for p, process in enumerate(world.processes):
            if process.step is None or process.step.end:
                continue
            if any(self.is_lost(world.processes, p, e) for e in range(len(self.ends))):
                failed = world._replace(processes=self.stop(world.processes, p, "failed"))
                yield f"process {p} waits too long for a rebinding", failed
            if not self._is_called(world, p, is_answered=False):
                left = world._replace(processes=self.stop(world.processes, p, "cancelled"))
                yield f"process {p} waits too long for a caller", left
        for o, run in enumerate(world.runs):
            if run is not None and run.end and not run.has_reader:
                yield f"{o} forgets the request", world.put(o, None)

    def _faults(self, world: World) -> Iterator[Move]:
        if world.crashes:
            fewer = world._replace(crashes=world.crashes - 1)
            for p, process in enumerate(world.processes):
                processes = put(world.processes, p, Process(process.incarnation + 1))
                late = frozenset(each for each in world.late if each[0] != p)
                if process.step is not None:
                    yield f"process {p} crashes", fewer._replace(processes=processes, late=late)
            for o, run in enumerate(world.runs):
                if run is not None:
                    yield f"{o} crashes", self._left(fewer.put(o, None), o)
        if world.faults:
            fewer = world._replace(faults=world.faults - 1)
            yield from self._late_moves(fewer)
            yield from self._timeouts(fewer)
            for o, run in enumerate(world.runs):
                if run is not None and run.has_reader:
                    lone = fewer.put(o, run._replace(has_reader=False))
                    yield f"the client's connection to {o} breaks", self._left(lone, o)
                if run is not None and not run.end:
                    yield from self._call_faults(fewer, o, run)

    def _left(self, world: World, o: int) -> World:
        """Returns the state after the client's connection to an orchestrator broke, if there was one."""
        client = world.client
        left = client._replace(follows=None, calls=client.calls + 1)
        return world._replace(client=left) if client.follows == o else world

    def _late_moves(self, world: World) -> Iterator[Move]:
        for message in world.late:
            (p, content, flag), processes = message, world.processes
            step = processes[p].step
            try:
                if isinstance(content, Call):
                    processes = self.execute(processes, p, content, attach_only=flag)
                elif isinstance(content, Rebinding):
                    processes = self.rebind(processes, p, content)
                elif step and not step.end and not (flag and self._is_called(world, p, is_answered=True)):
                    processes = self.stop(processes, p, "cancelled")
            except StagemeshError:
                continue
            if processes != world.processes:
                then = world._replace(late=world.late - {message}, processes=processes)
                yield f"a late call arrives at process {p}: {content}", then

    def _call_faults(self, world: World, o: int, run: Run) -> Iterator[Move]:
        for i, (name, stage) in enumerate(zip(self.names, run.stages, strict=True)):
            p, rebinding = self.place(i, stage.attempt), stage.rebinding
            if stage.call is not None and stage.follows:
                attach_only = stage.attempt == run.running or stage.events > 0
                copied = world._replace(late=world.late | {(p, stage.call, attach_only)})
                yield f"{o}: the call of {name} breaks and arrives twice", copied.put(o, run.put(i, follows=_SENT))
                yield f"{o} takes {name} for lost", self._failed(world, o, i, _LOST)
            if rebinding is not None:
                copied = world._replace(late=world.late | {(p, rebinding, False)})
                yield f"{o}: the rebinding of {name} is repeated", self._rebind(copied, o, i)
                late = self._rebind(copied, o, i, arrives=False, answers=False)
                yield f"{o}: the rebinding of {name} arrives later", late
                yield f"{o}: the answer to {name} is lost", self._rebind(world, o, i, answers=False)
                if any(self.ends[e][0] == i for e, *_ in rebinding.ends):
                    yield f"{o}: {name} has dropped its first chunk", self._rebind(world, o, i, keeps=False)
