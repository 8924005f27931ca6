"""`stagemesh probe-transport`."""

import json
import socket
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from stagemesh.common.settings import set_library_variables
from stagemesh.orchestrator.cli.error_output import AsJson

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from stagemesh.connectors.transport_probe import ConnectorFigures, TransportReport

_KIB, _MIB, _GB = 1 << 10, 1 << 20, 1e9


def probe_transport(
    peer: Annotated[
        str, typer.Argument(metavar="[HOST:PORT]", help="A host that serves probes; without it, this host is measured.")
    ] = "",
    serve: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Serve probes here until Ctrl-C, for another host to measure.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Measures each connector on this host, or to another one, and says which `connector: auto` uses."""
    import uvloop

    # What gRPC itself would log comes as errors.
    set_library_variables({"GRPC_VERBOSITY": "NONE"})
    if peer and serve:
        raise typer.BadParameter("either measure a peer or be one", param_hint="--serve")
    if serve:
        uvloop.run(_serve(serve, as_json=as_json))
        return
    report = uvloop.run(_measure(peer, progress=_silent if as_json else _tell))
    if as_json:
        typer.echo(json.dumps(asdict(report), ensure_ascii=False))
    else:
        _show(report)


async def _measure(peer: str, *, progress: "Callable[[str], None]") -> "TransportReport":
    from stagemesh.connectors.transport_probe import measure_peer, second_process

    if peer:
        return await measure_peer(peer, progress=progress)
    progress("starting a second process")
    async with second_process() as endpoint:
        return await measure_peer(endpoint, progress=progress)


async def _serve(listen: str, *, as_json: bool) -> None:
    from stagemesh.connectors.transport_probe import ProbePeer
    from stagemesh.orchestrator.cli.signals import stop_on_signals
    from stagemesh.rpc.server import Server

    stopping = stop_on_signals()
    server = Server(listen)
    async with ProbePeer.added_to(server.grpc):
        port = await server.start()
        host = listen.rpartition(":")[0]
        endpoint = f"{host}:{port}"
        if as_json:
            typer.echo(json.dumps({"event": "ready", "endpoint": endpoint}))
            sys.stdout.flush()
        else:
            reached_at = f"{_name_of(host)}:{port}"
            _tell(f"serving probes at {endpoint}; on the other host: stagemesh probe-transport {reached_at}")
        await stopping.wait()
        await server.stop(grace_s=0)


def _name_of(host: str) -> str:
    """How another host calls this one, where it listens at all of its addresses."""
    return socket.gethostname() if host in {"0.0.0.0", "[::]"} else host  # noqa: S104 - it is compared


def _tell(what: str) -> None:
    typer.echo(what, err=True)


def _silent(_: str) -> None:
    """For programs, which want the result alone."""


def _show(report: "TransportReport") -> None:
    from stagemesh.orchestrator.cli.tables import print_whole

    print_whole(_table(report))
    typer.echo(_choice(report))
    if report.clock_error_s:
        typer.echo(
            f"times are by two clocks, and may all be off by the same, up to {report.clock_error_s * 1e6:,.0f} µs"
        )


def _table(report: "TransportReport") -> "Table":
    from rich.table import Table
    from rich.text import Text

    from stagemesh.connectors.transport_probe import SIZES

    where = "within this host" if report.same_host else f"to {report.peer}"
    table = Table(
        "connector", *(_size(size) for size in SIZES), "GB/s", "CPU s/GB", "how", title=f"one way, medians, {where}"
    )
    table.title_justify = "left"
    for column in table.columns[1:-1]:
        column.justify = "right"
    for figures in report.connectors:
        if figures.refusal:
            blank = [""] * (len(table.columns) - 2)
            table.add_row(figures.connector, *blank, Text(f"not usable: {figures.refusal}", style="yellow"))
        else:
            table.add_row(figures.connector, *_cells(figures), Text(figures.how))
    return table


def _cells(figures: "ConnectorFigures") -> list[str]:
    return [
        *(_time(seconds) for seconds in figures.one_way_s.values()),
        f"{figures.bytes_per_s / _GB:.2f}",
        f"{figures.cpu_s_per_gb:.2f}",
    ]


def _choice(report: "TransportReport") -> str:
    if not report.passed_over:
        return f"auto uses {report.choice}, the best there is"
    reasons = "; ".join(f"{name}: {why}" for name, why in report.passed_over.items())
    return f"auto uses {report.choice}, for what is better cannot be used ({reasons})"


def _size(size_bytes: int) -> str:
    return f"{size_bytes // _MIB} MiB" if size_bytes >= _MIB else f"{size_bytes // _KIB} KiB"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"
