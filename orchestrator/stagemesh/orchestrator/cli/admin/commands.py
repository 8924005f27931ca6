"""The table of commands for operators: the name, RPC, parameters, request fields and display of each command."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from stagemesh.orchestrator.cli.admin import parameters as param
from stagemesh.orchestrator.cli.admin import views
from stagemesh.orchestrator.cli.output import Column, enum_word, links_table, make_table, size
from stagemesh.orchestrator.cli.parameters import Parameter

if TYPE_CHECKING:
    from rich.console import RenderableType

Values: TypeAlias = Mapping[str, Any]
"""The values of a command's parameters by name. If a replica answers the RPC, "replica" is the name of the replica."""
Display: TypeAlias = "Callable[[Any, Values], RenderableType]"
"""A function that returns the text or table to print for the answer of an RPC."""

_CHANGE_S = 600.0
_LOAD_S = 300.0
_RESTART_S = 3600.0


@dataclass(frozen=True)
class Command:
    """One command of `stagemesh admin`.

    If the RPC belongs to StageControlService, the command calls the RPC on each replica that the parameter `target`
    selects, one replica after the other.
    """

    name: str
    """The name of the command, preceded by the name of the command's group if there is one, for example "lora load"."""
    help: str
    rpc: str | Callable[[Values], str]
    display: Display
    parameters: Mapping[str, Parameter]
    """The parameters of the command by name. A parameter that has the name of a request field sets that field."""
    fields: Callable[[Values], Values] = lambda _: {}
    """A function that computes further request fields from the values of the parameters."""
    fails: Callable[[Any], bool] = lambda _: False
    """A function that returns whether an answer makes the command exit with status 1."""


def _table(columns: Sequence[Column], rows: str) -> Display:
    """Returns a display that shows the repeated field `rows` of an answer as a table."""
    return lambda answer, _: make_table(columns, getattr(answer, rows))


def _request_in_full(answer: Any, _: Values) -> "RenderableType":
    from stagemesh.orchestrator.cli.admin.request_view import request_view

    return request_view(answer)


def _restart_phase(answer: Any, _: Values) -> str:
    from stagemesh.v1 import admin_pb2

    running = f", {answer.running} requests are still running" if answer.running else ""
    return f"{answer.replica}: {enum_word(admin_pb2.RestartPhase.DESCRIPTOR, answer.phase)}{running}"


def _asleep(answer: Any, _: Values) -> str:
    return f"asleep: {', '.join(answer.asleep)}" if answer.asleep else "awake"


def _cache(answer: Any, values: Values) -> str:
    if values["clear"]:
        return "cleared"
    if answer.blocks:
        reused = answer.cached_tokens / answer.prompt_tokens if answer.prompt_tokens else 0.0
        return (
            f"{answer.blocks:,} blocks of {answer.block_tokens} tokens; "
            f"{reused:.0%} of {answer.prompt_tokens:,} prompt tokens were cached"
        )
    lookups = answer.hits + answer.misses
    return (
        f"{answer.entries:,} entries, {size(answer.size_bytes)} of {size(answer.limit_bytes)}; "
        f"{answer.hits / lookups if lookups else 0:.0%} of {lookups:,} lookups were hits"
    )


def _adapters(answer: Any, _: Values) -> str:
    lines = [
        f"\n  {each.name}  rank {each.rank}{', pinned' if each.pinned else ''}, {each.running} running  {each.path}"
        for each in answer.adapters
    ]
    return f"{len(answer.adapters)} adapters{''.join(lines)}"


def _busy_policy(values: Values) -> Values:
    return {"when_busy": "BUSY_POLICY_DRAIN" if values["drain"] else "BUSY_POLICY_REFUSE"}


_TARGET = {"target": param.TARGET}
_ID = {"request_id": param.REQUEST_ID}
_PAGE = {"page_size": param.PAGE_SIZE, "page_token": param.PAGE_TOKEN}
_ADAPTER = {**_TARGET, "name": param.LOADED_ADAPTER}

GROUPS = {
    "lora": "Load, list, pin and unload the LoRA adapters of stages.",
    "profile": "Record performance profiles of the engines of stages.",
}
COMMANDS = (
    Command(
        "pipelines",
        "List the pipelines that the orchestrator serves, their request counts, and the callers with requests in each.",
        "ListPipelines",
        lambda answer, _: views.pipelines_view(answer.pipelines),
        _PAGE,
    ),
    Command(
        "stages",
        "List the stages of the pipeline with the work on their replicas.",
        "ListStages",
        _table(views.STAGES, "stages"),
        _PAGE,
    ),
    Command(
        "replicas",
        "List the replicas of the stages with their state and their load.",
        "ListReplicas",
        _table(views.REPLICAS, "replicas"),
        {"stage": param.STAGE_FILTER, "state": param.REPLICA_STATE_FILTER, **_PAGE},
        lambda values: {"state": values["state"] and f"REPLICA_STATE_{values['state'].name}"},
    ),
    Command(
        "edges",
        "List the edges with the connectors that their replicas use, and the number of chunks and bytes transferred.",
        "ListEdges",
        lambda answer, _: views.edges_view(answer.edges),
        _PAGE,
    ),
    Command(
        "requests",
        "List the queued and running requests, oldest first. Use --state to list requests that have ended recently.",
        "ListRequests",
        _table(views.REQUESTS, "requests"),
        {"target": param.ON_TARGET, "states": param.REQUEST_STATE_FILTER, **_PAGE},
        lambda values: {"states": [f"REQUEST_STATE_{state.name}" for state in values["states"] or ()]},
    ),
    Command(
        "request",
        "Show one request: the steps on its stages, what each step waits for, its chunks in flight and its timeline.",
        "GetRequest",
        _request_in_full,
        _ID,
    ),
    Command(
        "drain",
        "Stop placing new requests on a replica or on all replicas of a stage. Running requests finish, or move with "
        "--move.",
        "DrainReplicas",
        _table(views.REPLICA_STATES, "replicas"),
        {
            **_TARGET,
            "wait": param.WAIT,
            "move": param.MOVE,
            "grace_s": param.GRACE,
            "force": param.FORCE_DRAIN,
            "timeout": param.timeout(_CHANGE_S),
        },
        lambda values: {"move_after_s": values["grace_s"] if values["move"] else None},
    ),
    Command(
        "resume",
        "End a drain, so that new requests are placed on the replica or the stage again.",
        "ResumeReplicas",
        _table(views.REPLICA_STATES, "replicas"),
        _TARGET,
    ),
    Command(
        "restart",
        "Restart a replica, or the replicas of a stage one after the other. Drains and stops each replica, "
        "then waits until its supervisor has started it again and it is ready.",
        "RestartReplicas",
        _restart_phase,
        {
            **_TARGET,
            "drain_s": param.DRAIN_TIME,
            "force": param.FORCE_RESTART,
            "timeout": param.timeout(_RESTART_S),
        },
    ),
    Command(
        "cancel",
        "Cancel a request. Returns after every stage has released it.",
        "CancelRequest",
        lambda _, values: f"cancelled {values['request_id']}; every stage has released it",
        _ID,
    ),
    Command(
        "probe",
        "Negotiate the connector of an edge again, between each producing and each consuming replica. Exits with "
        "status 1 if a negotiation fails.",
        "ProbeEdge",
        lambda answer, _: links_table([answer.edge]),
        {"edge": param.EDGE, "producer": param.PRODUCER, "consumer": param.CONSUMER},
        fails=lambda answer: any(link.HasField("error") for link in answer.edge.links),
    ),
    Command(
        "sleep",
        "Free the device memory of replicas. The replicas reject requests until `stagemesh admin wake`.",
        "Sleep",
        _asleep,
        {
            **_TARGET,
            "level": param.SLEEP_LEVEL,
            "drain": param.DRAIN_STEPS,
            "timeout": param.timeout(_CHANGE_S),
        },
        _busy_policy,
    ),
    Command(
        "wake",
        "Allocate the device memory of sleeping replicas again, so that they accept requests.",
        "Wake",
        _asleep,
        {**_TARGET, "tags": param.WAKE_TAGS, "timeout": param.timeout(_CHANGE_S)},
    ),
    Command(
        "cache",
        "Show the size and hit rate of an engine's cache, or delete the cached data with --clear.",
        lambda values: "ClearCaches" if values["clear"] else "GetCacheStatistics",
        _cache,
        {**_TARGET, "clear": param.CLEAR_CACHE, "preempt_running": param.PREEMPT},
    ),
    Command(
        "lora load",
        "Load a LoRA adapter from a folder, so that requests can select it by its name.",
        "LoadAdapter",
        lambda answer, _: f"loaded {answer.adapter.name}, rank {answer.adapter.rank}",
        {
            **_TARGET,
            "name": param.ADAPTER_NAME,
            "path": param.ADAPTER_FOLDER,
            "timeout": param.timeout(_LOAD_S),
        },
    ),
    Command(
        "lora unload",
        "Unload a LoRA adapter and free its memory.",
        "UnloadAdapter",
        lambda _, values: f"unloaded {values['name']}",
        {**_ADAPTER, "drain": param.DRAIN_ADAPTER, "timeout": param.timeout(_LOAD_S)},
        _busy_policy,
    ),
    Command(
        "lora pin",
        "Keep a LoRA adapter on the device until it is unloaded, so that no request waits for it.",
        "PinAdapter",
        lambda answer, _: f"pinned {answer.adapter.name}",
        _ADAPTER,
    ),
    Command(
        "lora list",
        "List the LoRA adapters that replicas have loaded.",
        "ListAdapters",
        _adapters,
        {**_TARGET, **_PAGE},
    ),
    Command(
        "profile start",
        "Start recording a performance profile of an engine. Each replica writes to a subfolder with its own name.",
        "StartProfile",
        lambda answer, _: f"records into {answer.folder}",
        {**_TARGET, "folder": param.PROFILE_FOLDER, "max_steps": param.PROFILE_STEPS},
        lambda values: {"folder": f"{values['folder']}/{values['replica']}"},
    ),
    Command(
        "profile stop",
        "Stop recording a performance profile, and print the paths of its files on each replica's machine.",
        "StopProfile",
        lambda answer, _: "".join(f"\n  {file}" for file in answer.files) or "no files",
        {**_TARGET, "timeout": param.timeout(_LOAD_S)},
    ),
)
