"""`stagemesh config`: writes the config files of a deployment by hand."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagemesh.common import settings
from stagemesh.common.errors import InvalidRequestError
from stagemesh.orchestrator.cli.contexts.addresses import DEFAULT_ADMIN_SERVER, DEFAULT_SERVER
from stagemesh.orchestrator.cli.options import PipelineName, read_pairs

if TYPE_CHECKING:
    from stagemesh.orchestrator.config import ReplicaAddress

app = typer.Typer(
    help="Write a complete config file with comments, for `stagemesh serve`.",
    no_args_is_help=True,
)

_Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write to this file.", show_default="standard output"),
]
_LEASE_S = 30.0


@app.command()
def orchestrator(
    pipeline: PipelineName,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Serve clients at this address.")] = DEFAULT_SERVER,
    admin_listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Serve operators and registering replicas at this address.")
    ] = DEFAULT_ADMIN_SERVER,
    replica: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=HOST:PORT",
            help="List this replica, whose name begins with its stage's name, for example thinker-0. Repeatable. "
            "Without this option, replicas register themselves.",
        ),
    ] = None,
    output: _Output = None,
) -> None:
    """Write the config file of an orchestrator."""
    from stagemesh.orchestrator.config import OrchestratorConfig, Registration
    from stagemesh.orchestrator.spec import load_pipeline

    loaded = load_pipeline(pipeline, check_models=False)
    config = OrchestratorConfig(
        pipeline=pipeline,
        replicas=_replicas(loaded.stages, replica or ()),
        listen=listen,
        admin_listen=admin_listen,
        registration=None if replica else Registration(_LEASE_S),
    )
    _write(config, output)


@app.command()
def stage(
    pipeline: PipelineName,
    name: Annotated[str, typer.Argument(metavar="STAGE", help="Write the config of a replica of this stage.")],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Listen on this address. Other hosts must reach it.")
    ],
    replica: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name the replica. Names are unique.", show_default="STAGE-0"),
    ] = None,
    orchestrators: Annotated[
        list[str] | None,
        typer.Option(
            "--orchestrator",
            metavar="HOST:PORT",
            help="Register with the orchestrator that serves operators at this address. Repeatable.",
        ),
    ] = None,
    output: _Output = None,
) -> None:
    """Write the config file of a replica of a stage."""
    from stagemesh.common.stage_config import OrchestratorAddress
    from stagemesh.orchestrator.launcher.process_configs import stage_config
    from stagemesh.orchestrator.spec import load_pipeline

    loaded = load_pipeline(pipeline, check_models=False)
    if name not in loaded.stages:
        raise InvalidRequestError(
            f"pipeline {loaded.name!r} has no stage {name!r}; its stages are {', '.join(loaded.stages)}",
            reason="INVALID_CONFIG",
        )
    if loaded.stages[name].is_external:
        raise InvalidRequestError(
            f"stage {name} is external, so that it has no config of Stagemesh; start the stage's own program",
            reason="INVALID_CONFIG",
        )
    derived = stage_config(loaded, loaded.stages[name], replica=replica or f"{name}-0", listen=listen)
    model = loaded.stages[name].model
    # The model may be on another machine.
    path = model if model is None else str(settings.find_model(model) or model)
    addresses = tuple(OrchestratorAddress(each) for each in orchestrators or ())
    _write(replace(derived, orchestrators=addresses, model=path), output)


def _replicas(stages: Collection[str], given: Sequence[str]) -> Mapping[str, "tuple[ReplicaAddress, ...]"]:
    """Returns the listed replicas by stage. The name of a replica begins with the name of its stage."""
    from stagemesh.orchestrator.config import ReplicaAddress

    found: dict[str, tuple[ReplicaAddress, ...]] = dict.fromkeys(stages, ())
    for name, endpoint in read_pairs(given, option="--replica", convert=str).items():
        owners = [stage for stage in stages if name.startswith(f"{stage}-")]
        if not owners:
            raise typer.BadParameter(
                f"{name!r} does not begin with a stage's name and '-'; the stages are {', '.join(stages)}",
                param_hint="--replica",
            )
        owner = max(owners, key=len)
        found[owner] += (ReplicaAddress(name, endpoint),)
    return found


def _write(config: object, output: Path | None) -> None:
    from stagemesh.common.config_text import config_text

    text = config_text(config)
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise InvalidRequestError(f"{output} cannot be written: {exc.strerror}", reason="CANNOT_WRITE") from exc
