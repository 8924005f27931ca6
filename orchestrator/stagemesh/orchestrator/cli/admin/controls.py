"""`stagemesh admin sleep`, `wake`, `cache`."""

from typing import TYPE_CHECKING, Annotated

import typer

from stagemesh.orchestrator.cli.admin.options import DEFAULT_SERVER, Server, Target, Timeout
from stagemesh.orchestrator.cli.error_output import AsJson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stagemesh.v1 import control_pb2

_LONG_S = 600.0


def sleep(
    target: Target,
    level: Annotated[int, typer.Option(min=1, max=2, help="1 keeps the weights in host memory, 2 drops them too.")] = 1,
    drain: Annotated[bool, typer.Option("--drain", help="Wait for what runs, instead of refusing.")] = False,
    timeout: Timeout = _LONG_S,
    server: Server = DEFAULT_SERVER,
    as_json: AsJson = False,
) -> None:
    """Gives the device's memory back; steps are refused until `wake`."""
    from stagemesh.orchestrator.cli.admin.replica_calls import call_replicas
    from stagemesh.v1 import control_pb2

    policy = control_pb2.BUSY_POLICY_DRAIN if drain else control_pb2.BUSY_POLICY_REFUSE
    request = control_pb2.SleepRequest(level=level, when_busy=policy)
    call_replicas(
        server,
        target,
        lambda admin, name: admin.control(admin.controls.Sleep, request, replica=name, timeout_s=timeout),
        describe=lambda answer: _asleep(answer.asleep),
        as_json=as_json,
    )


def wake(
    target: Target,
    tags: Annotated[list[str] | None, typer.Option("--tag", help="Only this; may be given again.")] = None,
    timeout: Timeout = _LONG_S,
    server: Server = DEFAULT_SERVER,
    as_json: AsJson = False,
) -> None:
    """Takes the device's memory again."""
    from stagemesh.orchestrator.cli.admin.replica_calls import call_replicas
    from stagemesh.v1 import control_pb2

    request = control_pb2.WakeRequest(tags=tags)
    call_replicas(
        server,
        target,
        lambda admin, name: admin.control(admin.controls.Wake, request, replica=name, timeout_s=timeout),
        describe=lambda answer: _asleep(answer.asleep),
        as_json=as_json,
    )


def cache(
    target: Target,
    clear: Annotated[bool, typer.Option("--clear", help="Forget what is kept of earlier requests.")] = False,
    preempt: Annotated[bool, typer.Option("--preempt", help="With --clear: from running requests too.")] = False,
    server: Server = DEFAULT_SERVER,
    as_json: AsJson = False,
) -> None:
    """Shows what an engine keeps of earlier requests, or clears it."""
    from stagemesh.orchestrator.cli.admin.replica_calls import call_replicas
    from stagemesh.v1 import control_pb2

    if clear:
        clearing = control_pb2.ClearCachesRequest(preempt_running=preempt)
        call_replicas(
            server,
            target,
            lambda admin, name: admin.control(admin.controls.ClearCaches, clearing, replica=name),
            describe=lambda _: "cleared",
            as_json=as_json,
        )
    else:
        asking = control_pb2.GetCacheStatisticsRequest()
        call_replicas(
            server,
            target,
            lambda admin, name: admin.control(admin.controls.GetCacheStatistics, asking, replica=name),
            describe=_statistics,
            as_json=as_json,
        )


def _asleep(words: "Sequence[str]") -> str:
    return f"asleep: {', '.join(words)}" if words else "awake"


def _statistics(answer: "control_pb2.GetCacheStatisticsResponse") -> str:
    from stagemesh.orchestrator.cli.admin.formatting import size

    if answer.blocks:
        found = answer.cached_tokens / answer.prompt_tokens if answer.prompt_tokens else 0.0
        return (
            f"{answer.blocks:,} blocks of {answer.block_tokens} tokens; {found:.0%} of {answer.prompt_tokens:,} prompt "
            "tokens found"
        )
    asked = answer.hits + answer.misses
    return (
        f"{answer.entries:,} entries, {size(answer.size_bytes)} of {size(answer.limit_bytes)}; "
        f"{answer.hits / asked if asked else 0:.0%} of {asked:,} found"
    )
