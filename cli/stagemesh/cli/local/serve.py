"""`stagemesh serve` and `stagemesh gateway`: run one process, for containers and service managers.

The command replaces itself with the module that the launcher also starts, so that signals reach this module
directly and the command line imports neither the orchestrator's service nor a stage.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from stagemesh.cli.terminal.contexts import DEFAULT_SERVER, split_addresses
from stagemesh.cli.terminal.options import Kind, Parameters, argument, command, flag, option, with_parameters
from stagemesh.common.errors import InvalidRequestError

if TYPE_CHECKING:
    from stagemesh.common.process.config import ProcessConfig


app = typer.Typer(
    help="Run one process of a deployment until SIGTERM or Ctrl-C: an orchestrator, a replica of a stage, a media "
    "service, or a job server.",
    no_args_is_help=True,
)

_CONFIG_HELP = "Read the configuration from this JSON file. A single - reads it from standard input."
_CONFIG = argument(str, _CONFIG_HELP, metavar="CONFIG")
_OPTIONAL_CONFIG = argument(str | None, f"{_CONFIG_HELP} Not allowed with --pipeline.", metavar="CONFIG", default=None)
_PIPELINE = option(
    str,
    "Derive the configuration from the built-in pipeline with this name, or from the YAML file at this path. Replaces "
    "CONFIG.",
    metavar="PIPELINE",
)
_LISTEN = option(Kind.ADDRESS, "Listen on this address. Required with --pipeline.")
_TLS = option(
    str,
    "Serve TLS with ca.crt, tls.crt and tls.key in this folder (docs/security.md).",
    metavar="FOLDER",
    show_default="no TLS",
)
_HEALTH_LISTEN = option(
    Kind.ADDRESS, "Answer health checks without TLS at this further address.", show_default="only at --listen"
)

_METRICS_LISTEN = option(Kind.ADDRESS, "Serve metrics to Prometheus at this address.", show_default="no metrics")


@command(app, {"config": _CONFIG})
def orchestrator(config: str) -> None:
    """Run an orchestrator. docs/replicas.md describes its configuration."""
    replace_process("stagemesh.orchestrator", config)


_STAGE: Parameters = {
    "config": _OPTIONAL_CONFIG,
    "pipeline": _PIPELINE,
    "stage": option(Kind.NAME, "Run this stage of the pipeline. Required with --pipeline."),
    "replica": option(Kind.NAME, "Name the replica. Names are unique in the pipeline. Required with --pipeline."),
    "listen": _LISTEN,
    "generation": option(
        Kind.NAME,
        "Set the generation that the replica reports to orchestrators.",
        show_default="computed from the pipeline file",
    ),
    "drain_s": option(
        Kind.SECONDS,
        "Give running steps this number of seconds to end after SIGTERM.",
        min=0,
        max=86400,
        show_default="10",
    ),
    "sleep_when_idle_s": option(
        Kind.SECONDS,
        "Sleep after loading and after this number of seconds without a step. Orchestrators whose configuration names "
        "the stage in `warm` wake the replica.",
        min=1,
        max=86400,
        show_default="never sleep",
    ),
    "tls": _TLS,
    "health_listen": _HEALTH_LISTEN,
    "metrics_listen": _METRICS_LISTEN,
}


_CONFIG_KEYS = ("generation", "drain_s", "sleep_when_idle_s", "tls", "health_listen", "metrics_listen")
"""The options that set the key of this name in the replica's configuration."""


@command(app, _STAGE)
def stage(config: str | None, **values: Any) -> None:
    """Run a replica of a stage, configured by CONFIG (docs/replicas.md) or by a pipeline file.

    With --pipeline, only the model of the stage itself must exist on this machine. If the stage is a vllm stage whose
    option node_rank is above 0, run the workers of that node of the replica.
    """
    _run_config("stagemesh.services.stage", config, values, required=("stage", "replica", "listen"))
    from stagemesh.cli.launcher.process_configs import find_stage, stage_config
    from stagemesh.pipeline import load_pipeline

    name, pipeline = values["stage"], load_pipeline(values["pipeline"], check_models=[values["stage"]])
    found = find_stage(pipeline, name, option="--stage: ")
    derived = stage_config(pipeline, found, replica=values["replica"], listen=values["listen"])
    derived = replace(derived, **{name: values[name] for name in _CONFIG_KEYS if values[name] not in (None, "")})
    is_further_node = derived.engine == "vllm" and derived.options.get("node_rank")
    module = "stagemesh.services.engines.vllm.node" if is_further_node else "stagemesh.services.stage"
    replace_process(module, standard_input(derived))


_MEDIA: Parameters = {
    "config": _OPTIONAL_CONFIG,
    "pipeline": _PIPELINE,
    "listen": _LISTEN,
    "name": option(
        Kind.NAME, "Name the process. Processes with the same store need different names.", show_default="media"
    ),
    "tls": _TLS,
    "health_listen": _HEALTH_LISTEN,
}


@command(app, _MEDIA)
def media(config: str | None, **values: Any) -> None:
    """Run a media service, which stores uploads and serves downloads.

    It is configured by CONFIG (docs/media.md) or by a pipeline file.
    """
    _run_config("stagemesh.services.media", config, values, required=("listen",))
    from stagemesh.cli.launcher.process_configs import MEDIA, media_service_config
    from stagemesh.pipeline import load_pipeline

    pipeline = load_pipeline(values["pipeline"], check_models=False)
    derived = media_service_config(pipeline, listen=values["listen"], name=values["name"] or MEDIA)
    derived = replace(derived, tls=values["tls"], health_listen=values["health_listen"])
    replace_process("stagemesh.services.media", standard_input(derived))


_JOBS: Parameters = {
    "config": _CONFIG,
    "name": option(
        Kind.NAME,
        "Name the process. Processes with the same database or the same store need different names.",
        show_default="that of CONFIG",
    ),
}


@command(app, _JOBS)
def jobs(config: str, name: str | None) -> None:
    """Run a job server, which runs requests that survive restarts. docs/jobs.md describes its configuration."""
    if name is None:
        replace_process("stagemesh.jobs", config)
    from stagemesh.common.process.config import load_config
    from stagemesh.jobs.config import JobServerConfig

    loaded = load_config(JobServerConfig, Path(config))
    replace_process("stagemesh.jobs", standard_input(replace(loaded, name=name)))


def _run_config(module: str, config: str | None, values: Mapping[str, Any], *, required: Sequence[str]) -> None:
    """Runs a module if CONFIG is given. Returns if --pipeline is given instead.

    Raises BadParameter unless exactly one form of the command is given: CONFIG alone, or --pipeline.
    `values` are the values of the options by parameter name, and None for options that are omitted. `required` are the
    parameters that --pipeline needs.
    """
    names = {name: f"--{name.replace('_', '-')}" for name in values}
    given = [names[name] for name, value in values.items() if value is not None]
    if config is not None and given:
        raise typer.BadParameter(f"CONFIG contains all settings; give either CONFIG or {', '.join(given)}, not both")
    if config is not None:
        replace_process(module, config)
    if values["pipeline"] is None:
        raise typer.BadParameter("give CONFIG, or --pipeline and the options that it requires", param_hint="CONFIG")
    if missing := [names[name] for name in required if not values[name]]:
        raise typer.BadParameter("it is required with --pipeline", param_hint=" and ".join(missing))


def standard_input(config: "ProcessConfig") -> str:
    """Makes standard input a file that contains a config. Returns the name by which a process reads it."""
    from stagemesh.common.process.config import STDIN, dump_config

    file = os.memfd_create("config")
    os.write(file, dump_config(config))
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, 0)
    return STDIN


def replace_process(module: str, config: str) -> NoReturn:
    """Runs a module with a config file instead of this program."""
    # -u disables buffering, so that the log of a killed process is complete.
    os.execv(sys.executable, [sys.executable, "-u", "-m", module, f"--config={config}"])  # noqa: S606 - our own module


_GATEWAY_LISTEN = "127.0.0.1:8000"
_GATEWAY: Parameters = {
    "config": argument(str | None, f"{_CONFIG_HELP} Replaces all options.", metavar="CONFIG", default=None),
    "server": option(
        list[str],
        "Serve the pipeline of these orchestrators. Repeatable, for several pipelines.",
        metavar="HOST:PORT[,HOST:PORT]...",
        show_default=DEFAULT_SERVER,
    ),
    "listen": option(Kind.ADDRESS, "Serve HTTP at this address.", show_default=_GATEWAY_LISTEN),
    "tls": option(
        str,
        "Connect to the orchestrators by TLS with ca.crt in this folder, and with the token of each HTTP caller, or "
        "with tls.crt and tls.key in the folder for all of them (docs/gateway.md).",
        metavar="FOLDER",
        show_default="no TLS",
    ),
    "https": option(str, "Serve HTTPS with tls.crt and tls.key in this folder.", metavar="FOLDER", show_default="HTTP"),
    "voices": option(
        str,
        "Store the voices that callers create in this folder. Several gateways may share it.",
        metavar="FOLDER",
        show_default="callers cannot create voices",
    ),
    "host": option(
        list[str],
        "Accept requests for this further host name. Repeatable. A gateway that does not forward tokens accepts only "
        "requests for these, for its own address and for localhost.",
        metavar="NAME",
        show_default="none",
    ),
    "cors_origin": option(
        list[str],
        "Let web pages of this origin call the gateway. Repeatable. * stands for all pages, and needs tokens.",
        metavar="SCHEME://HOST[:PORT]",
        show_default="none",
    ),
    "metrics_listen": _METRICS_LISTEN,
    "strict": flag(
        "Reject parameters that have no effect, instead of ignoring them with a warning (docs/gateway-parameters.md).",
        "--strict",
    ),
    "no_page": flag("Serve only the API, without the page at / on which people try a pipeline.", "--no-page"),
}


@with_parameters(_GATEWAY)
def gateway(config: str | None, **values: Any) -> None:
    """Serve OpenAI's API for running pipelines until SIGTERM or Ctrl-C: chat, completions, speech and images."""
    if config is not None:
        if any(value is not None and value is not False for value in values.values()):
            raise typer.BadParameter("it replaces all options; give either of them", param_hint="CONFIG")
        replace_process("stagemesh.gateway", config)
    from stagemesh.gateway.config import GatewayConfig

    try:
        servers = [split_addresses(each) for each in values["server"] or [DEFAULT_SERVER]]
    except ValueError as exc:
        raise InvalidRequestError(f"--server: {exc}") from exc
    try:
        derived = GatewayConfig(
            values["listen"] or _GATEWAY_LISTEN,
            servers,
            tls=values["tls"],
            https=values["https"],
            hosts=values["host"] or None,
            cors_origins=values["cors_origin"] or (),
            metrics_listen=values["metrics_listen"],
            strict=values["strict"],
            page=not values["no_page"],
            voices=values["voices"],
        )
    except ValueError as exc:
        raise InvalidRequestError(f"--host, --cors-origin: {exc}") from exc
    replace_process("stagemesh.gateway", standard_input(derived))
