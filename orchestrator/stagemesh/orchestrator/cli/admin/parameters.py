"""The arguments and options of the commands for operators, with shell completion of the names that the server knows."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import typer

from stagemesh.orchestrator.cli.options import DEFAULT_ADMIN_SERVER
from stagemesh.orchestrator.cli.parameters import Parameter, argument, option

_COMPLETION_TIMEOUT_S = 0.5
# For each list RPC of AdminService: the answer's field with the items, and a function that returns an item's name.
_LISTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "ListStages": ("stages", lambda stage: stage.name),
    "ListReplicas": ("replicas", lambda replica: replica.name),
    "ListEdges": ("edges", lambda edge: edge.edge.name),
    "ListRequests": ("requests", lambda request: request.request_id),
}


def _complete(*rpcs: str) -> Callable[[typer.Context, str], list[str]]:
    """Returns a shell completion callback for the names in the answers of these list RPCs.

    The callback completes nothing if the server does not answer.
    """

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
    """The values of `--state` for lists of replicas."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    ASLEEP = "asleep"
    UNREACHABLE = "unreachable"


class RequestStateOption(StrEnum):
    """The values of `--state` for lists of requests."""

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

TARGET = argument(
    str,
    "Select the replica with this name, or all replicas of the stage with this name.",
    metavar="TARGET",
    complete=complete_target,
)
REQUEST_ID = argument(str, "Select the request with this id.", metavar="ID", complete=complete_request)
EDGE = argument(str, "Select the edge with this name, for example 'a->b'.", metavar="EDGE", complete=complete_edge)
STAGE_FILTER = option(
    str,
    "List only the replicas of this stage. Lists the replicas of all stages if omitted.",
    "--stage",
    default="",
    metavar="STAGE",
    autocompletion=complete_stage,
)
REPLICA_STATE_FILTER = option(
    ReplicaStateOption, "List only replicas in this state. Lists replicas in all states if omitted.", "--state"
)
REQUEST_STATE_FILTER = option(
    list[RequestStateOption],
    "List only requests in this state. Repeatable. Lists queued and running requests if omitted. Ended requests are "
    "listed for a limited time.",
    "--state",
)
ON_TARGET = option(
    str,
    "List only requests with a step on this replica or stage. Lists all requests if omitted.",
    "--on",
    default="",
    metavar="TARGET",
    autocompletion=complete_target,
)
PRODUCER = option(
    str,
    "Probe only from this producing replica. Probes from all producing replicas if omitted.",
    default="",
    metavar="REPLICA",
    autocompletion=complete_replica,
)
CONSUMER = option(
    str,
    "Probe only to this consuming replica. Probes to all consuming replicas if omitted.",
    default="",
    metavar="REPLICA",
    autocompletion=complete_replica,
)
PAGE_SIZE = option(int, "List at most this number of items. 0 means 100.", default=0, min=0)
PAGE_TOKEN = option(
    str,
    "Continue a list at the token that was printed with its previous page. Starts at the first item if omitted.",
    default="",
    metavar="TOKEN",
)


def timeout(default_s: float) -> Parameter:
    """Returns the option --timeout, whose default is `default_s` seconds."""
    return option(
        float,
        "Fail if the command takes longer than this number of seconds.",
        "--timeout",
        default=default_s,
        min=0.1,
        metavar="SECONDS",
    )


WAIT = option(bool, "Return only after all requests on the drained replicas have ended.", "--wait", default=False)
MOVE = option(bool, "Move running requests to other replicas instead of letting them finish.", "--move", default=False)
GRACE = option(
    float,
    "With --move, wait this number of seconds for requests to finish before moving them. 0 moves them at once.",
    "--grace",
    default=0.0,
    min=0,
    metavar="SECONDS",
)
FORCE_DRAIN = option(
    bool,
    "Drain even if the stage would have no ready replica left. Requests that need the stage are then rejected.",
    "--force",
    default=False,
)
FORCE_RESTART = option(
    bool,
    "Restart even if no ready replica would remain, and stop requests that are still running after --drain.",
    "--force",
    default=False,
)
DRAIN_TIME = option(
    float,
    "Wait at most this number of seconds for the requests on each replica to finish. 0 means 300 seconds.",
    "--drain",
    default=0.0,
    min=0,
    metavar="SECONDS",
)
SLEEP_LEVEL = option(
    int,
    "Set the sleep level. Level 1 keeps the weights in host memory. Level 2 drops the weights, and `wake` reads them "
    "again.",
    default=1,
    min=1,
    max=2,
)
DRAIN_STEPS = option(
    bool,
    "Wait until running steps have ended. Without this option, the command fails if steps are running.",
    "--drain",
    default=False,
)
DRAIN_ADAPTER = option(
    bool,
    "Wait until requests that use the adapter have ended. Without this option, the command fails if requests use the "
    "adapter.",
    "--drain",
    default=False,
)
WAKE_TAGS = option(
    list[str],
    "Allocate only the part of the device memory with this tag, which `sleep` printed. Repeatable. Allocates all "
    "parts if omitted.",
    "--tag",
    metavar="TAG",
)
CLEAR_CACHE = option(
    bool, "Delete the cached data instead of showing the cache's statistics.", "--clear", default=False
)
PREEMPT = option(
    bool,
    "With --clear, also delete cached data that running requests use, so that they compute it again. Without this "
    "option, --clear fails if running requests use the cache.",
    "--preempt",
    default=False,
)
LOADED_ADAPTER = argument(str, "Select the loaded adapter with this name.", metavar="NAME")
ADAPTER_NAME = argument(str, "Set the name by which requests select the adapter.", metavar="NAME")
ADAPTER_FOLDER = argument(
    str, "Read the adapter from this folder on the replica's machine. The path must be absolute.", metavar="FOLDER"
)
PROFILE_FOLDER = option(
    str,
    "Write the files to this folder, which is relative to the folder in the stage's option profile_dir.",
    "--folder",
    default="profile",
    metavar="FOLDER",
)
PROFILE_STEPS = option(
    int,
    "Stop recording after this number of engine steps. Records until `stagemesh admin profile stop` if omitted.",
    "--steps",
    min=1,
)
