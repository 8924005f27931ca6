"""The table of commands for operators: the name, RPC, parameters, request fields and display of each command.

Shell completion suggests the names of stages, replicas, edges and requests that AdminService lists.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from stagemesh.cli.operation import admin_targets as targets
from stagemesh.cli.operation import views
from stagemesh.cli.terminal.options import Kind, Parameter, argument, flag, option
from stagemesh.cli.terminal.output import WATCH, links_table

_CHANGE_S = 600.0
_LOAD_S = 300.0
_RESTART_S = 3600.0


def _no_fields(_: views.Values) -> views.Values:
    return {}


class Command:
    """One command of `stagemesh admin`.

    If the command's RPC belongs to StageControlService, the command has a parameter `target`: the name of a replica or
    stage. The command then calls the RPC on each selected replica, one after the other.
    """

    def __init__(
        self,
        name: str,
        description: str,
        rpc: str | Callable[[views.Values], str],
        display: views.Display,
        fields: Callable[[views.Values], views.Values] = _no_fields,
        fails: Callable[[Any], bool] = lambda _: False,
        /,
        **parameters: Parameter,
    ) -> None:
        """Creates a command.

        - `name` starts with the name of the command's group if the command has a group, for example "lora load".
        - `description` is the command's help text.
        - `rpc` is the name of the RPC, or a function that selects the RPC by the values of the parameters.
        - `display` returns the text or table to print for an answer.
        - `fields` computes further request fields from the values of the parameters.
        - `fails` returns whether an answer makes the command exit with code 1.
        - `parameters` are the parameters by name. A parameter that has the name of a request field sets that field.
        """
        self.name, self.description, self.rpc, self.display = name, description, rpc, display
        self.fields, self.fails, self.parameters = fields, fails, parameters


def _any_failed(answer: Any) -> bool:
    return any(each.HasField("error") for each in answer.replicas)


def _busy_policy(values: views.Values) -> views.Values:
    return {"when_busy": "BUSY_POLICY_DRAIN" if values["drain"] else "BUSY_POLICY_REFUSE"}


def _seconds(text: str, name: str, *, default: float = 0.0, least: float = 0) -> Parameter:
    return option(Kind.SECONDS, text, name, default=default, min=least)


def _on(text: str) -> Parameter:
    return option(str, text, "--on", metavar="TARGET", autocompletion=targets.complete_target)


def _replica(text: str) -> Parameter:
    return option(str, text, metavar="REPLICA", autocompletion=targets.complete_replica)


def _timeout(default_s: float) -> Parameter:
    text = "Fail if the command takes longer than this number of seconds."
    return _seconds(text, "--timeout", default=default_s, least=0.1)


_ReplicaState = StrEnum("_ReplicaState", ["LOADING", "READY", "DRAINING", "FAILED", "ASLEEP", "UNREACHABLE"])
_RequestState = StrEnum("_RequestState", ["QUEUED", "RUNNING", "FINISHED", "FAILED", "CANCELLED"])
_PAGE = {
    "page_size": option(int, "List at most this number of items. 0 means 100.", default=0, min=0),
    "page_token": option(
        str,
        "Continue the list from this token, which was printed with the previous page. Starts at the first item if "
        "omitted.",
        metavar="TOKEN",
    ),
    "all_pages": flag("List all items. --page-size then sets the number of items that each call returns.", "--all"),
    **WATCH,
}

_LogLevel = StrEnum("_LogLevel", ["DEBUG", "INFO", "WARNING", "ERROR"])
GROUPS = {
    "lora": "Load, list, pin and unload the LoRA adapters of stages.",
    "profile": "Record performance profiles of stage engines.",
}
COMMANDS = (
    Command(
        "pipelines",
        "List the pipelines that the orchestrator serves, their request counts, and the callers with requests in each.",
        "ListPipelines",
        lambda answer, _: views.pipelines_view(answer.pipelines),
        **_PAGE,
    ),
    Command(
        "stages",
        "List the stages with their replicas' load, and the number of finished and failed steps.",
        "ListStages",
        views.table_display(views.STAGES, "stages"),
        **_PAGE,
    ),
    Command(
        "replicas",
        "List the replicas of the stages with their state and their load.",
        "ListReplicas",
        views.table_display(views.REPLICAS, "replicas"),
        lambda values: {"state": values["state"] and f"REPLICA_STATE_{values['state'].name}"},
        stage=option(
            str,
            "List only the replicas of this stage. Lists the replicas of all stages if omitted.",
            "--stage",
            metavar="STAGE",
            autocompletion=targets.complete_names("ListStages"),
        ),
        state=option(
            _ReplicaState, "List only replicas in this state. Lists replicas in all states if omitted.", "--state"
        ),
        **_PAGE,
    ),
    Command(
        "edges",
        "List the edges with the connectors that their replicas use, and the number of chunks and bytes transferred.",
        "ListEdges",
        lambda answer, _: views.edges_view(answer.edges),
        **_PAGE,
    ),
    Command(
        "requests",
        "List the queued and running requests, oldest first. Use --state to list requests that have ended recently, "
        "newest first.",
        "ListRequests",
        views.table_display(views.REQUESTS, "requests"),
        lambda values: {"states": [f"REQUEST_STATE_{state.name}" for state in values["states"] or ()]},
        target=_on("List only requests with a step on this replica or stage. Lists all requests if omitted."),
        states=option(
            list[_RequestState],
            "List only requests in this state. Repeatable. Lists queued and running requests if omitted. Ended "
            "requests are listed for a limited time.",
            "--state",
        ),
        **_PAGE,
    ),
    Command(
        "request",
        "Show a request: its step on each stage, what each step is waiting for, the request's chunks in flight, and "
        "its timeline.",
        "GetRequest",
        lambda answer, _: views.request_view(answer),
        **targets.REQUEST_ID,
    ),
    Command(
        "drain",
        "Stop placing new requests on a replica or on all replicas of a stage. Running requests finish, or move with "
        "--move.",
        "DrainReplicas",
        views.table_display(views.REPLICA_STATES, "replicas"),
        lambda values: {"move_after_s": values["grace_s"] if values["move"] else None},
        **targets.TARGET,
        wait=flag("Return only after all requests on the drained replicas have ended.", "--wait"),
        move=flag("Move running requests to other replicas instead of letting them finish.", "--move"),
        grace_s=_seconds(
            "With --move, wait this number of seconds for requests to finish before moving them. 0 moves them at once.",
            "--grace",
        ),
        force=flag(
            "Drain even if the stage would have no ready replica left. Requests that need the stage are then rejected.",
            "--force",
        ),
        timeout=_timeout(_CHANGE_S),
    ),
    Command(
        "resume",
        "End the drain of a replica or a stage, so that it receives new requests again.",
        "ResumeReplicas",
        views.table_display(views.REPLICA_STATES, "replicas"),
        **targets.TARGET,
    ),
    Command(
        "restart",
        "Restart a replica, or the replicas of a stage one after the other. Drains and stops each replica, "
        "then waits until its supervisor has started it again and it is ready.",
        "RestartReplicas",
        views.restart_phase,
        **targets.TARGET,
        drain_s=_seconds(
            "Wait at most this number of seconds for the requests on each replica to finish.",
            "--drain",
            default=300.0,
            least=0.1,
        ),
        force=flag(
            "Restart even if no ready replica would remain, and stop requests that are still running after --drain.",
            "--force",
        ),
        timeout=_timeout(_RESTART_S),
    ),
    Command(
        "cancel",
        "Cancel a request. Returns after every stage has released it.",
        "CancelRequest",
        lambda _, values: f"cancelled {values['request_id']}; every stage has released it",
        **targets.REQUEST_ID,
    ),
    Command(
        "log-level",
        "Set the level of the logs of the orchestrator and of all replicas while they run, until they end. Exits with "
        "status 1 if a process fails.",
        "SetLogLevel",
        views.log_levels_text,
        lambda values: {"level": f"LOG_LEVEL_{values['level'].name}"},
        lambda answer: any(each.HasField("error") for each in answer.processes),
        level=argument(_LogLevel, "Write records of this level and of those above it.", metavar="LEVEL"),
        target=_on("Select only the replica or the stage with this name, or the orchestrator with @orchestrator."),
        logger=option(
            Kind.NAME,
            "Set the level of this logger and of those below it, for example stagemesh.connectors or vllm. Sets that "
            "of Stagemesh if omitted.",
        ),
    ),
    Command(
        "probe",
        "Negotiate the connector of an edge again, between each producing and each consuming replica. Exits with "
        "code 1 if a negotiation fails.",
        "ProbeEdge",
        lambda answer, _: links_table([answer.edge]),
        _no_fields,
        lambda answer: any(link.HasField("error") for link in answer.edge.links),
        edge=argument(
            str,
            "Select the edge with this name, for example 'a->b'.",
            metavar="EDGE",
            complete=targets.complete_names("ListEdges"),
        ),
        producer=_replica("Probe only from this producing replica. Probes from all producing replicas if omitted."),
        consumer=_replica(
            "Probe only connections to this consuming replica. Probes connections to all consuming replicas if omitted."
        ),
    ),
    Command(
        "sleep",
        "Free the device memory of replicas. The replicas reject requests until `stagemesh admin wake`.",
        "Sleep",
        views.sleep_result,
        _busy_policy,
        **targets.TARGET,
        level=option(
            int,
            "Set the sleep level. Level 1 keeps the weights in host memory. Level 2 drops the weights, and `wake` "
            "reads them again.",
            default=1,
            min=1,
            max=2,
        ),
        drain=flag(
            "Wait until running steps have ended. Without this option, the command fails if steps are running.",
            "--drain",
        ),
        timeout=_timeout(_CHANGE_S),
    ),
    Command(
        "wake",
        "Allocate the device memory of sleeping replicas again, so that they accept requests.",
        "Wake",
        views.sleep_result,
        **targets.TARGET,
        tags=option(
            list[str],
            "Allocate only the part of the device memory with this tag. `stagemesh admin sleep` prints the tags. "
            "Repeatable. Allocates all parts if omitted.",
            "--tag",
            metavar="TAG",
        ),
        timeout=_timeout(_CHANGE_S),
    ),
    Command(
        "cache",
        "Show the size and hit rate of an engine's cache, or delete the cached data with --clear.",
        lambda values: "ClearCaches" if values["clear"] else "GetCacheStatistics",
        views.cache_result,
        **targets.TARGET,
        clear=flag("Delete the cached data instead of showing the cache's statistics.", "--clear"),
        preempt_running=flag(
            "With --clear, also delete cached data that running requests use. Those requests compute it again. "
            "Without this option, --clear fails if running requests use the cache.",
            "--preempt",
        ),
    ),
    Command(
        "lora load",
        "Load a LoRA adapter from a folder on all replicas of a stage, so that requests can select it by its name. "
        "Replicas that start later load it, too. Exits with status 1 if a replica fails.",
        "LoadAdapter",
        lambda answer, values: f"loaded {values['name']}{views.outcomes_text(answer, values)}",
        _no_fields,
        _any_failed,
        **targets.STAGE,
        name=argument(Kind.NAME, "Set the name by which requests select the adapter."),
        path=argument(
            str,
            "Read the adapter from this folder on each replica's machine. The path must be absolute.",
            metavar="FOLDER",
        ),
        timeout=_timeout(_LOAD_S),
    ),
    Command(
        "lora unload",
        "Unload a LoRA adapter from all replicas of a stage and free its memory. Exits with status 1 if a replica "
        "fails.",
        "UnloadAdapter",
        lambda answer, values: f"unloaded {values['name']}{views.outcomes_text(answer, values)}",
        _busy_policy,
        _any_failed,
        **targets.STAGE,
        name=targets.ADAPTER_NAME,
        drain=flag(
            "Wait until requests that use the adapter have ended. Without this option, the command fails if "
            "requests use the adapter.",
            "--drain",
        ),
        timeout=_timeout(_LOAD_S),
    ),
    Command(
        "lora pin",
        "Keep a LoRA adapter on the device until it is unloaded, so that no request waits for it.",
        "PinAdapter",
        lambda answer, _: f"pinned {answer.adapter.name}",
        **targets.TARGET,
        name=targets.ADAPTER_NAME,
    ),
    Command(
        "lora list",
        "List the LoRA adapters of a stage, and the replicas that have loaded each.",
        "ListAdapters",
        views.adapters_text,
        **targets.STAGE,
        **_PAGE,
    ),
    Command(
        "profile start",
        "Start recording a performance profile of an engine. Each replica writes to a subfolder that is named after "
        "the replica.",
        "StartProfile",
        lambda answer, _: f"records into {answer.folder}",
        lambda values: {"folder": f"{values['folder']}/{values['replica']}"},
        **targets.TARGET,
        folder=option(
            str,
            "Write the files to this folder. The path is relative to the folder that the stage's option profile_dir "
            "sets.",
            "--folder",
            default="profile",
            metavar="FOLDER",
        ),
        max_steps=option(
            int,
            "Stop recording after this number of engine steps. Records until `stagemesh admin profile stop` if "
            "omitted.",
            "--steps",
            min=1,
        ),
    ),
    Command(
        "profile stop",
        "Stop recording a performance profile, and print the paths of its files on each replica's machine.",
        "StopProfile",
        lambda answer, _: "".join(f"\n  {file}" for file in answer.files) or "no files",
        **targets.TARGET,
        timeout=_timeout(_LOAD_S),
    ),
)
