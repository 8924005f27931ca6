"""`stagemesh certificate` and `stagemesh token`: create the credentials of processes and users."""

import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from stagemesh.common.errors import InvalidRequestError
from stagemesh.orchestrator.cli.error_output import AsJson
from stagemesh.orchestrator.cli.output import print_json

certificates = typer.Typer(
    help="Create certificates for TLS, signed by an authority of your own. A cluster can use cert-manager instead.",
    no_args_is_help=True,
)
tokens = typer.Typer(help="Create tokens by which clients identify themselves.", no_args_is_help=True)

_TOKEN_BYTES = 32


@certificates.command("new")
def new_certificate(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Write ca.crt, tls.crt and tls.key to this folder.")],
    authority: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            help="Sign with the authority in this folder, which contains ca.crt and ca.key. It is created if it does "
            "not exist.",
        ),
    ],
    names: Annotated[
        list[str],
        typer.Option(
            "--name",
            metavar="ROLE/NAME",
            help="Set what the owner is: stage/REPLICA, orchestrator/NAME, operator/NAME or client/NAME. In the name "
            "of a replica, * stands for any text. Repeatable.",
        ),
    ],
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="HOST",
            help="Set a DNS name or an IP address at which the owner listens. Repeatable. Users need none.",
        ),
    ] = None,
    days: Annotated[float, typer.Option(min=0.001, help="Set the number of days until the certificate expires.")] = 90,
    as_json: AsJson = False,
) -> None:
    """Create a certificate, or renew it. Services that use the folder read it again without a restart."""
    from stagemesh.orchestrator.launcher.certificates import Authority

    Authority(authority).issue(folder, names, hosts=hosts or (), days=days)
    if as_json:
        print_json({"folder": str(folder), "names": names, "hosts": hosts or [], "days": days})
    else:
        typer.echo(f"wrote the certificate of {', '.join(names)} to {folder}; it expires in {days:g} days")


@tokens.command("new")
def new_token(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Add the digest of the token to this file, which a server's config names."),
    ],
    caller: Annotated[str, typer.Option(metavar="NAME", help="Set the name of the caller that the token identifies.")],
    days: Annotated[
        float | None,
        typer.Option(min=0.001, help="Set the number of days until the token expires. It does not expire if omitted."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a token and print it. It cannot be shown again. To revoke a token, remove its entry from the file."""
    from stagemesh.rpc.token_file import TokenEntry, add_token

    token = secrets.token_urlsafe(_TOKEN_BYTES)
    expires = None if days is None else datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)
    try:
        add_token(file, token, TokenEntry(caller, expires))
    except OSError as exc:
        raise InvalidRequestError(f"{file} cannot be written: {exc.strerror}", reason="CANNOT_WRITE") from exc
    if as_json:
        print_json({"token": token, "caller": caller, "expires": expires.isoformat() if expires else None})
    else:
        typer.echo(token)
