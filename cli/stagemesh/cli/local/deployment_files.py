"""`stagemesh config`, `certificate` and `token`: write the files that a deployment's processes need."""

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from stagemesh.cli.terminal.contexts import DEFAULT_ADMIN_SERVER, DEFAULT_SERVER
from stagemesh.cli.terminal.error_output import AS_JSON
from stagemesh.cli.terminal.options import REQUIRED, Kind, Parameters, argument, command, option, read_pairs
from stagemesh.cli.terminal.output import print_result
from stagemesh.cli.terminal.pipeline_options import PIPELINE
from stagemesh.common.errors import InvalidRequestError, writing
from stagemesh.common.process import settings

if TYPE_CHECKING:
    from stagemesh.orchestrator.config import ReplicaAddress


app = typer.Typer(help="Write a complete config file with comments, for `stagemesh serve`.", no_args_is_help=True)

_OUTPUT = option(Kind.FILE, "Write to this file.", "--output", "-o", show_default="standard output")
_LEASE_S = 30.0

_ORCHESTRATOR: Parameters = {
    "pipeline": PIPELINE,
    "listen": option(Kind.ADDRESS, "Serve clients at this address.", default=DEFAULT_SERVER),
    "admin_listen": option(
        Kind.ADDRESS, "Serve operators and registering replicas at this address.", default=DEFAULT_ADMIN_SERVER
    ),
    "replica": option(
        list[str],
        "List this replica, whose name begins with its stage's name, for example thinker-0. Repeatable. Without this "
        "option, replicas register themselves.",
        metavar="NAME=HOST:PORT",
    ),
    "output": _OUTPUT,
}


@command(app, _ORCHESTRATOR)
def orchestrator(
    *, pipeline: str, listen: str, admin_listen: str, replica: Sequence[str] | None, output: Path | None
) -> None:
    """Write the config file of an orchestrator."""
    from stagemesh.orchestrator.config import OrchestratorConfig, Registration
    from stagemesh.pipeline import load_pipeline

    loaded = load_pipeline(pipeline, check_models=False)
    config = OrchestratorConfig(
        pipeline=pipeline,
        replicas=_replicas(loaded.stages, replica or ()),
        listen=listen,
        admin_listen=admin_listen,
        registration=None if replica else Registration(_LEASE_S),
    )
    _write(config, output)


_STAGE: Parameters = {
    "pipeline": PIPELINE,
    "name": argument(str, "Write the config of a replica of this stage.", metavar="STAGE"),
    "listen": option(Kind.ADDRESS, "Listen on this address. Other hosts must reach it.", default=REQUIRED),
    "replica": option(Kind.NAME, "Name the replica. Names are unique.", show_default="STAGE-0"),
    "orchestrators": option(
        [Kind.ADDRESS],
        "Register with the orchestrator that serves operators at this address. Repeatable.",
        "--orchestrator",
    ),
    "output": _OUTPUT,
}


@command(app, _STAGE)
def stage(**values: Any) -> None:
    """Write the config file of a replica of a stage."""
    from stagemesh.cli.launcher.process_configs import find_stage, stage_config
    from stagemesh.common.process.stage_process import OrchestratorAddress
    from stagemesh.pipeline import load_pipeline

    name, loaded = values["name"], load_pipeline(values["pipeline"], check_models=False)
    found = find_stage(loaded, name)
    if found.is_external:
        raise InvalidRequestError(
            f"stage {name} is external, so that it has no config of Stagemesh; start the stage's own program",
            reason="INVALID_CONFIG",
        )
    replica = values["replica"] or f"{name}-0"
    derived = stage_config(loaded, found, replica=replica, listen=values["listen"])
    # The model may be on another machine.
    path = found.model if found.model is None else str(settings.find_model(found.model) or found.model)
    addresses = tuple(OrchestratorAddress(each) for each in values["orchestrators"] or ())
    _write(replace(derived, orchestrators=addresses, model=path), values["output"])


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
    from stagemesh.common.process.config import config_text

    text = config_text(config)
    if output is None:
        typer.echo(text, nl=False)
        return
    with writing(output):
        output.write_text(text, encoding="utf-8")


certificates = typer.Typer(
    help="Create certificates for TLS, signed by an authority of your own. A cluster can use cert-manager instead.",
    no_args_is_help=True,
)
tokens = typer.Typer(help="Create tokens by which clients identify themselves.", no_args_is_help=True)

_TOKEN_BYTES = 32


_CERTIFICATE: Parameters = {
    "folder": argument(Kind.FOLDER, "Write ca.crt, tls.crt and tls.key to this folder."),
    "authority": option(
        Kind.FOLDER,
        "Sign with the authority in this folder, which contains ca.crt and ca.key. It is created if it does not exist.",
        default=REQUIRED,
    ),
    "names": option(
        list[str],
        "Set what the owner is: stage/STAGE/REPLICA, orchestrator/NAME, operator/NAME or client/NAME. In the name of a "
        "replica, * stands for letters, digits, _ and the full stop, but not for -. Repeatable. A media service needs "
        "none.",
        "--name",
        metavar="ROLE/NAME",
    ),
    "hosts": option(
        list[str],
        "Set a DNS name or an IP address at which the owner listens. Repeatable. Users need none.",
        "--host",
        metavar="HOST",
    ),
    "days": option(float, "Set the number of days until the certificate expires.", default=90, min=0.001),
    **AS_JSON,
}


@command(certificates, _CERTIFICATE, name="new")
def new_certificate(
    *,
    folder: Path,
    authority: Path,
    names: Sequence[str] | None,
    hosts: Sequence[str] | None,
    days: float,
    as_json: bool,
) -> None:
    """Create a certificate, or renew it. Services that use the folder read it again without a restart."""
    from stagemesh.cli.launcher.certificates import Authority

    Authority(authority).issue(folder, names or (), hosts=hosts or (), days=days)
    document = {"folder": str(folder), "names": names or [], "hosts": hosts or [], "days": days}
    text = f"wrote the certificate of {', '.join(names or hosts or ())} to {folder}; it expires in {days:g} days"
    print_result(document, text, as_json=as_json)


_TOKEN: Parameters = {
    "file": argument(Kind.FILE, "Add the digest of the token to this file, which a server's config names."),
    "caller": option(Kind.NAME, "Set the name of the caller that the token identifies.", default=REQUIRED),
    "days": option(float, "Set the number of days until the token expires. It does not expire if omitted.", min=0.001),
    **AS_JSON,
}


@command(tokens, _TOKEN, name="new")
def new_token(*, file: Path, caller: str, days: float | None, as_json: bool) -> None:
    """Create a token and print it. It cannot be shown again. To revoke a token, remove its entry from the file."""
    from stagemesh.rpc.authentication import TokenEntry, add_token

    token = secrets.token_urlsafe(_TOKEN_BYTES)
    expires = None if days is None else datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)
    with writing(file):
        add_token(file, token, TokenEntry(caller, expires))
    document = {"token": token, "caller": caller, "expires": expires.isoformat() if expires else None}
    print_result(document, token, as_json=as_json)
