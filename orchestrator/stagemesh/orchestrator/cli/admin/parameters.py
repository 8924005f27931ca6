"""The arguments and options of the commands for operators, with shell completion of the names that the server knows."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from stagemesh.orchestrator.cli.options import DEFAULT_ADMIN_SERVER

_COMPLETION_TIMEOUT_S = 0.5
# For each list of AdminService: its field in the answer, and the name of an item.
_LISTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "ListStages": ("stages", lambda stage: stage.name),
    "ListReplicas": ("replicas", lambda replica: replica.name),
    "ListEdges": ("edges", lambda edge: edge.edge.name),
    "ListRequests": ("requests", lambda request: request.request_id),
}


def _complete(*rpcs: str) -> Callable[[typer.Context, str], list[str]]:
    """Returns a completion callback for names in these lists. It completes nothing if the server does not answer."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        from stagemesh.common.errors import StagemeshError
        from stagemesh.orchestrator.cli.admin.client import connected

        try:
            with connected(ctx.params.get("server") or DEFAULT_ADMIN_SERVER) as admin:
                return [name for rpc in rpcs for name in _names(admin, rpc) if name.startswith(incomplete)]
        except StagemeshError:
            return []

    return complete


def _names(admin: Any, rpc: str) -> Sequence[str]:
    from stagemesh.orchestrator.cli.admin.client import make_request

    items, name = _LISTS[rpc]
    answer = admin.call(rpc, make_request(rpc, {}), timeout_s=_COMPLETION_TIMEOUT_S)
    return [name(item) for item in getattr(answer, items)]


class ReplicaStateOption(StrEnum):
    """The replica states that `--state` accepts."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    ASLEEP = "asleep"
    UNREACHABLE = "unreachable"


class RequestStateOption(StrEnum):
    """The request states that `--state` accepts."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


complete_stage = _complete("ListStages")
complete_target = _complete("ListStages", "ListReplicas")
complete_replica = _complete("ListReplicas")
complete_edge = _complete("ListEdges")
complete_request = _complete("ListRequests")

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="Select the replica with this name, or all replicas of the stage with this name.",
        autocompletion=complete_target,
    ),
]
RequestId = Annotated[
    str, typer.Argument(metavar="ID", help="Select the request with this id.", autocompletion=complete_request)
]
Edge = Annotated[
    str,
    typer.Argument(
        metavar="EDGE", help="Select the edge with this name, for example 'a->b'.", autocompletion=complete_edge
    ),
]
StageFilter = Annotated[
    str,
    typer.Option(
        "--stage",
        metavar="STAGE",
        help="List only the replicas of this stage. Lists those of all stages if omitted.",
        autocompletion=complete_stage,
        show_default=False,
    ),
]
ReplicaStateFilter = Annotated[
    ReplicaStateOption | None,
    typer.Option("--state", help="List only replicas in this state. Lists those in all states if omitted."),
]
RequestStateFilter = Annotated[
    list[RequestStateOption] | None,
    typer.Option(
        "--state",
        help="List only requests in this state. Repeatable. Lists queued and running requests if omitted. Ended "
        "requests are listed for a limited time.",
    ),
]
OnTarget = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="TARGET",
        help="List only requests with a step on this replica or stage. Lists all requests if omitted.",
        autocompletion=complete_target,
        show_default=False,
    ),
]
Producer = Annotated[
    str,
    typer.Option(
        metavar="REPLICA",
        help="Probe only from this producing replica. Probes from all of them if omitted.",
        autocompletion=complete_replica,
        show_default=False,
    ),
]
Consumer = Annotated[
    str,
    typer.Option(
        metavar="REPLICA",
        help="Probe only to this consuming replica. Probes to all of them if omitted.",
        autocompletion=complete_replica,
        show_default=False,
    ),
]
PageSize = Annotated[int, typer.Option(min=0, help="List at most this number of items. 0 means 100.")]
PageToken = Annotated[
    str,
    typer.Option(
        metavar="TOKEN",
        help="Continue a list at the token that was printed with its previous page. Starts at the first item if "
        "omitted.",
        show_default=False,
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", min=0.1, metavar="SECONDS", help="Fail if the command takes longer than this number of seconds."
    ),
]
Wait = Annotated[
    bool, typer.Option("--wait", help="Return only after all requests on the drained replicas have ended.")
]
Move = Annotated[
    bool, typer.Option("--move", help="Move running requests to other replicas instead of finishing them here.")
]
Grace = Annotated[
    float,
    typer.Option(
        "--grace",
        min=0,
        metavar="SECONDS",
        help="With --move, wait this number of seconds for requests to finish before moving them. 0 moves them at "
        "once.",
    ),
]
ForceDrain = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Drain even if the stage would have no ready replica left. Requests that need the stage are then "
        "rejected.",
    ),
]
ForceRestart = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Restart even if no ready replica would remain, and stop requests that are still running after --drain.",
    ),
]
DrainTime = Annotated[
    float,
    typer.Option(
        "--drain",
        min=0,
        metavar="SECONDS",
        help="Wait at most this number of seconds for the requests on each replica to finish. 0 means 300 seconds.",
    ),
]
SleepLevel = Annotated[
    int,
    typer.Option(
        min=1,
        max=2,
        help="Set the sleep level. Level 1 keeps the weights in host memory. Level 2 drops the weights, and `wake` "
        "reads them again.",
    ),
]
DrainSteps = Annotated[
    bool,
    typer.Option(
        "--drain",
        help="Wait until running steps have ended. Without this option, the command fails if steps are running.",
    ),
]
DrainAdapter = Annotated[
    bool,
    typer.Option(
        "--drain",
        help="Wait until requests that use the adapter have ended. Without this option, the command fails if there "
        "are such requests.",
    ),
]
WakeTags = Annotated[
    list[str] | None,
    typer.Option(
        "--tag",
        metavar="TAG",
        help="Allocate only the part of the device memory with this tag, which `sleep` printed. Repeatable. "
        "Allocates all parts if omitted.",
    ),
]
ClearCache = Annotated[
    bool, typer.Option("--clear", help="Delete the cached data instead of showing the cache's statistics.")
]
Preempt = Annotated[
    bool,
    typer.Option(
        "--preempt",
        help="With --clear, also delete cached data that running requests use, so that they compute it again. "
        "Without this option, --clear fails if running requests use the cache.",
    ),
]
LoadedAdapter = Annotated[str, typer.Argument(metavar="NAME", help="Select the loaded adapter with this name.")]
AdapterName = Annotated[str, typer.Argument(metavar="NAME", help="Set the name by which requests select the adapter.")]
AdapterFolder = Annotated[
    str,
    typer.Argument(
        metavar="FOLDER", help="Read the adapter from this folder on the replica's machine. The path must be absolute."
    ),
]
ProfileFolder = Annotated[
    str,
    typer.Option(
        "--folder",
        metavar="FOLDER",
        help="Write the files to this folder, which is relative to the folder in the stage's option profile_dir.",
    ),
]
ProfileSteps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        min=1,
        help="Stop recording after this number of engine steps. Records until `stagemesh admin profile stop` if "
        "omitted.",
    ),
]
