"""Runs the cases against a stage: the connection, the order, and the limits in time."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from stagemesh.common.errors import DeadlineError, InvalidRequestError, NotReadyError, UnavailableError
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.stage_conformance.cases import Case, MismatchError, Result, in_order, run_case
from stagemesh.stage_conformance.content import PROTOCOL, read_inputs
from stagemesh.stage_conformance.trial import Stage, Trial
from stagemesh.v1 import stage_pb2, stage_pb2_grpc
from stagemesh.v1.tensor_pb2 import TypedValue

_AT_ONCE = 8
"""The number of cases that run at the same time. Most of them wait."""
_DESCRIBE_S = 5.0

Report = Callable[[Result, int], None]
"""Called with each result, and with the number of results so far."""


@dataclass(frozen=True)
class Settings:
    """How requests to the stage are made, and how long a case may take."""

    stage: str = ""
    """The name that the stage must have, or "" for any."""
    inputs: Mapping[str, str] = field(default_factory=dict[str, str])
    """For an accepted tensor, a type or the path of an .npy file."""
    options: Mapping[str, TypedValue] = field(default_factory=dict[str, TypedValue])
    prompt: str = "Tell me three things about the ocean."
    max_tokens: int = 32
    """The length of the outputs of a stage that chooses tokens."""
    has_output: bool = True
    """Whether edges may leave the stage, if it emits tensors."""
    host: str = "127.0.0.1"
    limit_s: float = 60.0
    """The time limit of a case in seconds."""


@dataclass(frozen=True)
class Outcome:
    """The description of the stage by itself, and the results of all cases."""

    described: stage_pb2.DescribeResponse
    results: Sequence[Result]


async def check_stage(endpoint: str, cases: Sequence[Case], settings: Settings, report: Report) -> Outcome:
    """Runs cases against the stage at `endpoint`. Returns their results in the order of `cases`.

    Raises UnavailableError if the stage is unreachable, InvalidRequestError (UNKNOWN_STAGE) if it has another name, and
    NotReadyError if it is not ready.
    """
    async with open_channel(endpoint) as channel:
        stage = await describe_stage(endpoint, channel, settings)
        results: dict[str, Result] = {}
        slots = asyncio.Semaphore(_AT_ONCE)

        async def run(case: Case) -> None:
            async with slots:
                results[case.name] = result = await run_case(case, Trial(stage), limit_s=settings.limit_s)
                report(result, len(results))

        # A wrong reference would fail most other cases. The case of the good request reports the cause.
        try:
            async with Trial(stage) as trial, asyncio.timeout(settings.limit_s):
                stage.reference = await trial.good()
        except (MismatchError, TimeoutError, grpc.aio.AioRpcError):
            stage.reference = None
        for group in in_order(cases):
            async with asyncio.TaskGroup() as tasks:
                for each in group:
                    tasks.create_task(run(each))
        return Outcome(stage.described, [results[each.name] for each in cases])


async def describe_stage(endpoint: str, channel: grpc.aio.Channel, settings: Settings) -> Stage:
    """Asks the stage at `endpoint` for its identity and its signature. Raises the errors of `check_stage`."""
    request = stage_pb2.DescribeRequest(protocol=PROTOCOL)
    try:
        described = await stage_pb2_grpc.StageServiceStub(channel).Describe(request, timeout=_DESCRIBE_S)
    except grpc.aio.AioRpcError as exc:
        error = from_rpc_error(exc, peer=f"the stage at {endpoint}")
        if isinstance(error, DeadlineError | UnavailableError):
            # Without metadata, the command line adds no remedy for an orchestrator.
            problem = f"{error.message}; start the stage, or correct HOST:PORT"
            raise UnavailableError(problem, reason="NO_ANSWER") from exc
        raise error from exc
    if settings.stage not in {"", described.stage}:
        raise InvalidRequestError(
            f"the replica at {endpoint} belongs to the stage {described.stage!r}, not {settings.stage!r}",
            reason="UNKNOWN_STAGE",
        )
    if described.state != stage_pb2.REPLICA_STATE_READY:
        state = stage_pb2.ReplicaState.Name(described.state).removeprefix("REPLICA_STATE_")
        raise NotReadyError(f"the stage at {endpoint} is {state} {described.detail}; wait until it is ready")
    try:
        inputs = read_inputs(described.signature.accepts, settings.inputs)
    except (ValueError, OSError) as exc:
        raise InvalidRequestError(f"--input: {exc}") from exc
    emits = any(not each.spec.ticket_kind for each in described.signature.emits)
    return Stage(
        endpoint,
        channel,
        described,
        inputs,
        prompt=settings.prompt,
        max_tokens=settings.max_tokens,
        options=settings.options,
        has_output=settings.has_output and (emits or not described.HasField("signature")),
        host=settings.host,
    )
