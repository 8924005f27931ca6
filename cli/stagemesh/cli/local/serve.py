"""`stagemesh serve` and `stagemesh gateway`: run one process, for containers and service managers.

The command replaces itself with the module that the launcher also starts, so that signals reach this module
directly and the command line imports neither the orchestrator's service nor a stage.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from stagemesh.cli.terminal.contexts import DEFAULT_SERVER, split_addresses
from stagemesh.common.errors import InvalidRequestError

if TYPE_CHECKING:
    from stagemesh.common.process.config import ProcessConfig


app = typer.Typer(
    help="Run one process of a deployment until SIGTERM or Ctrl-C: an orchestrator, a replica of a stage, a media "
    "service, or a job server.",
    no_args_is_help=True,
)

_CONFIG_HELP = "Read the configuration from this JSON file. A single - reads it from standard input."
_Config = Annotated[str, typer.Argument(metavar="CONFIG", help=_CONFIG_HELP)]
_OptionalConfig = Annotated[
    str | None,
    typer.Argument(metavar="CONFIG", help=f"{_CONFIG_HELP} Not allowed with --pipeline.", show_default=False),
]
_Pipeline = Annotated[
    str | None,
    typer.Option(
        metavar="PIPELINE",
        help="Derive the configuration from the built-in pipeline with this name, or from the YAML file at this path. "
        "Replaces CONFIG.",
    ),
]
_Listen = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Listen on this address. Required with --pipeline."),
]
_Tls = Annotated[
    str | None,
    typer.Option(
        "--tls",
        metavar="FOLDER",
        help="Serve TLS with ca.crt, tls.crt and tls.key in this folder (docs/security.md).",
        show_default="no TLS",
    ),
]
_HealthListen = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Answer health checks without TLS at this further address.",
        show_default="only at --listen",
    ),
]
_MetricsListen = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Serve metrics to Prometheus at this address.", show_default="no metrics"),
]


@app.command()
def orchestrator(config: _Config) -> None:
    """Run an orchestrator. docs/replicas.md describes its configuration."""
    replace_process("stagemesh.orchestrator", config)


@app.command()
def stage(
    config: _OptionalConfig = None,
    pipeline: _Pipeline = None,
    stage: Annotated[
        str | None, typer.Option(metavar="NAME", help="Run this stage of the pipeline. Required with --pipeline.")
    ] = None,
    replica: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name the replica. Names are unique in the pipeline. Required with --pipeline."
        ),
    ] = None,
    listen: _Listen = None,
    generation: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Set the generation that the replica reports to orchestrators.",
            show_default="computed from the pipeline file",
        ),
    ] = None,
    drain_s: Annotated[
        float | None,
        typer.Option(
            "--drain-s",
            min=0,
            max=86400,
            metavar="SECONDS",
            help="Give running steps this number of seconds to end after SIGTERM.",
            show_default="10",
        ),
    ] = None,
    sleep_when_idle_s: Annotated[
        float | None,
        typer.Option(
            "--sleep-when-idle-s",
            min=1,
            max=86400,
            metavar="SECONDS",
            help="Sleep after loading and after this number of seconds without a step. Orchestrators whose "
            "configuration names the stage in `warm` wake the replica.",
            show_default="never sleep",
        ),
    ] = None,
    tls: _Tls = None,
    health_listen: _HealthListen = None,
    metrics_listen: _MetricsListen = None,
) -> None:
    """Run a replica of a stage, configured by CONFIG (docs/replicas.md) or by a pipeline file.

    With --pipeline, only the model of the stage itself must exist on this machine. If the stage is a vllm stage whose
    option node_rank is above 0, run the workers of that node of the replica.
    """
    required = {"--stage": stage, "--replica": replica, "--listen": listen}
    optional = {
        "--generation": generation,
        "--drain-s": drain_s,
        "--sleep-when-idle-s": sleep_when_idle_s,
        "--tls": tls,
        "--health-listen": health_listen,
        "--metrics-listen": metrics_listen,
    }
    _check_form(config, pipeline, required=required, optional=optional)
    if config is not None:
        replace_process("stagemesh.services.stage", config)
    from stagemesh.cli.launcher.process_configs import stage_config
    from stagemesh.pipeline import load_pipeline

    loaded = load_pipeline(str(pipeline), check_models=[str(stage)])
    served = loaded.stages.get(str(stage))
    if served is None:
        raise InvalidRequestError(
            f"--stage: pipeline {loaded.name!r} has no stage {stage!r}; its stages are {', '.join(loaded.stages)}",
            reason="INVALID_CONFIG",
        )
    derived = stage_config(loaded, served, replica=str(replica), listen=str(listen))
    derived = replace(
        derived,
        generation=generation or derived.generation,
        drain_s=derived.drain_s if drain_s is None else drain_s,
        sleep_when_idle_s=sleep_when_idle_s,
        tls=tls,
        health_listen=health_listen,
        metrics_listen=metrics_listen,
    )
    is_further_node = derived.engine == "vllm" and derived.options.get("node_rank")
    module = "stagemesh.services.engines.vllm.node" if is_further_node else "stagemesh.services.stage"
    replace_process(module, standard_input(derived))


@app.command()
def media(
    config: _OptionalConfig = None,
    pipeline: _Pipeline = None,
    listen: _Listen = None,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name the process. Processes with the same store need different names.",
            show_default="media",
        ),
    ] = None,
    tls: _Tls = None,
    health_listen: _HealthListen = None,
) -> None:
    """Run a media service, which stores uploads and serves downloads.

    It is configured by CONFIG (docs/media.md) or by a pipeline file.
    """
    _check_form(
        config,
        pipeline,
        required={"--listen": listen},
        optional={"--name": name, "--tls": tls, "--health-listen": health_listen},
    )
    if config is not None:
        replace_process("stagemesh.services.media", config)
    from stagemesh.cli.launcher.process_configs import MEDIA, media_service_config
    from stagemesh.pipeline import load_pipeline

    loaded = load_pipeline(str(pipeline), check_models=False)
    derived = media_service_config(loaded, listen=str(listen), name=name or MEDIA)
    derived = replace(derived, tls=tls, health_listen=health_listen)
    replace_process("stagemesh.services.media", standard_input(derived))


@app.command()
def jobs(
    config: _Config,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name the process. Processes with the same database or the same store need different names.",
            show_default="that of CONFIG",
        ),
    ] = None,
) -> None:
    """Run a job server, which runs requests that survive restarts. docs/jobs.md describes its configuration."""
    if name is None:
        replace_process("stagemesh.jobs", config)
    from stagemesh.common.process.config import load_config
    from stagemesh.jobs.config import JobServerConfig

    loaded = load_config(JobServerConfig, Path(config))
    replace_process("stagemesh.jobs", standard_input(replace(loaded, name=name)))


def _check_form(
    config: str | None, pipeline: str | None, *, required: Mapping[str, object], optional: Mapping[str, object]
) -> None:
    """Raises BadParameter unless exactly one form of the command is given: CONFIG alone, or --pipeline.

    `required` and `optional` are the values of the options that belong to --pipeline, by name. None stands for an
    option that is omitted.
    """
    given = [name for name, value in {"--pipeline": pipeline, **required, **optional}.items() if value is not None]
    if config is not None and given:
        raise typer.BadParameter(f"CONFIG contains all settings; give either CONFIG or {', '.join(given)}, not both")
    if config is None and pipeline is None:
        raise typer.BadParameter("give CONFIG, or --pipeline and the options that it requires", param_hint="CONFIG")
    missing = [name for name, value in required.items() if not value]
    if config is None and missing:
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


_LISTEN = "127.0.0.1:8000"


def gateway(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG",
            help="Read the configuration from this JSON file. A single - reads it from standard input. Replaces all "
            "options.",
            show_default=False,
        ),
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT[,HOST:PORT]...",
            help="Serve the pipeline of these orchestrators. Repeatable, for several pipelines.",
            show_default=DEFAULT_SERVER,
        ),
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve HTTP at this address.", show_default=_LISTEN)
    ] = None,
    tls: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Connect to the orchestrators by TLS with ca.crt in this folder, and with the token of each HTTP "
            "caller, or with tls.crt and tls.key in the folder for all of them (docs/gateway.md).",
            show_default="no TLS",
        ),
    ] = None,
    https: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Serve HTTPS with tls.crt and tls.key in this folder.", show_default="HTTP"
        ),
    ] = None,
    voices: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Store the voices that callers create in this folder. Several gateways may share it.",
            show_default="callers cannot create voices",
        ),
    ] = None,
    no_page: Annotated[
        bool,
        typer.Option("--no-page", help="Serve only the API, without the page at / on which people try a pipeline."),
    ] = False,
) -> None:
    """Serve OpenAI's API for running pipelines until SIGTERM or Ctrl-C: chat, completions, speech and images."""
    if config is not None:
        if no_page or any(value is not None for value in (server, listen, tls, https, voices)):
            raise typer.BadParameter("it replaces all options; give either of them", param_hint="CONFIG")
        replace_process("stagemesh.gateway", config)
    from stagemesh.gateway.config import GatewayConfig

    try:
        servers = [split_addresses(each) for each in server or [DEFAULT_SERVER]]
    except ValueError as exc:
        raise InvalidRequestError(f"--server: {exc}") from exc
    derived = GatewayConfig(listen or _LISTEN, servers, tls=tls, https=https, page=not no_page, voices=voices)
    replace_process("stagemesh.gateway", standard_input(derived))
