"""`stagemesh probe-transport`: measures the connectors within a host or between two hosts."""

import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from stagemesh.cli.terminal.error_output import AS_JSON
from stagemesh.cli.terminal.options import Kind, Parameters, argument, option, with_parameters
from stagemesh.cli.terminal.output import print_all, print_json
from stagemesh.cli.terminal.tables import Column, make_table, number

if TYPE_CHECKING:
    from rich.table import Table

    from stagemesh.bench.transport import TransportReport

_KIB, _MIB, _GB = 1 << 10, 1 << 20, 1e9


_PROBE: Parameters = {
    "peer": argument(
        str,
        "Measure the connection to the host at this address, which must run `stagemesh probe-transport --serve`. "
        "Measures within this host if omitted.",
        metavar="[HOST:PORT]",
        default="",
    ),
    "serve": option(
        Kind.ADDRESS,
        "Answer probes at this address until Ctrl-C, so that another host can measure its connection to this host.",
        default="",
    ),
    **AS_JSON,
}


@with_parameters(_PROBE)
def probe_transport(*, peer: str, serve: str, as_json: bool) -> None:
    """Measure the latency and throughput of each connector, within this host or to another host. Print which connector
    `connector: auto` selects.
    """
    import uvloop

    if peer and serve:
        raise typer.BadParameter("give either HOST:PORT to measure or --serve, not both", param_hint="--serve")
    if serve:
        uvloop.run(_serve(serve, as_json=as_json))
        return
    report = uvloop.run(_measure(peer, progress=(lambda _: None) if as_json else _print_progress))
    if as_json:
        print_json(asdict(report))
    else:
        _show(report)


async def _measure(peer: str, *, progress: Callable[[str], None]) -> "TransportReport":
    from stagemesh.bench.transport import measure_peer, second_process

    if peer:
        return await measure_peer(peer, progress=progress)
    progress("starting a second process")
    async with second_process() as endpoint:
        return await measure_peer(endpoint, progress=progress)


async def _serve(listen: str, *, as_json: bool) -> None:
    from stagemesh.bench.transport import ProbePeer
    from stagemesh.common.process.lifecycle import stop_on_signals
    from stagemesh.rpc.callers import OPERATOR, STAGE
    from stagemesh.rpc.server import Server

    stopping = stop_on_signals()
    server = Server(listen, roles={OPERATOR, STAGE})
    async with ProbePeer.added_to(server.grpc):
        port = await server.start()
        host = listen.rpartition(":")[0]
        endpoint = f"{host}:{port}"
        if as_json:
            print_json({"event": "ready", "endpoint": endpoint})
        else:
            reached_at = f"{_name_of(host)}:{port}"
            _print_progress(f"serving probes at {endpoint}; on the other host: stagemesh probe-transport {reached_at}")
        await stopping.wait()
        await server.stop(grace_s=0)


def _name_of(host: str) -> str:
    """Returns the name or address at which other hosts reach a server that listens on `host`.

    If `host` is a wildcard address, returns the name of this host. Otherwise, returns `host`.
    """
    return socket.gethostname() if host in {"0.0.0.0", "[::]"} else host  # noqa: S104 - only compared


def _print_progress(message: str) -> None:
    typer.echo(message, err=True)


def _show(report: "TransportReport") -> None:
    print_all(_table(report))
    typer.echo(_choice(report))
    if report.clock_error_s:
        typer.echo(
            f"the hosts' clocks differ by at most {report.clock_error_s * 1e6:,.0f} µs; all times share this error"
        )


def _table(report: "TransportReport") -> "Table":
    from stagemesh.bench.transport import SIZES

    scope = "within this host" if report.same_host else f"to {report.peer}"
    columns = (
        Column("connector", lambda figures: figures.connector),
        *map(_latency_column, SIZES),
        number("GB/s", lambda each: "" if each.refusal else f"{each.bytes_per_s / _GB:.2f}"),
        number("CPU s/GB", lambda each: "" if each.refusal else f"{each.cpu_s_per_gb:.2f}"),
        Column("how", lambda each: [(f"not usable: {each.refusal}", "yellow")] if each.refusal else each.how),
    )
    return make_table(columns, report.connectors, title=f"one-way latency, median, {scope}")


def _latency_column(size_bytes: int) -> Column:
    return number(_size(size_bytes), lambda each: "" if each.refusal else _time(each.one_way_s[size_bytes]))


def _choice(report: "TransportReport") -> str:
    if not report.passed_over:
        return f"auto selects {report.choice}, the best of all connectors"
    reasons = "; ".join(f"{name}: {why}" for name, why in report.passed_over.items())
    return f"auto selects {report.choice}, because better connectors cannot be used ({reasons})"


def _size(size_bytes: int) -> str:
    return f"{size_bytes // _MIB} MiB" if size_bytes >= _MIB else f"{size_bytes // _KIB} KiB"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"
