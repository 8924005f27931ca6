"""`stagemesh up`: runs a pipeline on this machine until a signal arrives."""

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from stagemesh.cli.terminal.contexts import DEFAULT_PORT, DEFAULT_SERVER, MAX_PORT
from stagemesh.cli.terminal.error_output import AS_JSON
from stagemesh.cli.terminal.options import (
    PIPELINE,
    REPLICAS,
    SETTINGS,
    Parameter,
    flag,
    option,
    read_overrides,
    with_parameters,
)
from stagemesh.common.errors import needs_extra

if TYPE_CHECKING:
    from stagemesh.cli.launcher import Launcher
    from stagemesh.cli.launcher.certificates import Authority
    from stagemesh.cli.local.process_display import Display


_HOST = "127.0.0.1"
CLIENT, OPERATOR = "client", "operator"
"""The folders with the certificates of users, within that of `--tls`."""
_Result = TypeVar("_Result")


_UP: Mapping[str, Parameter] = {
    "pipeline": PIPELINE,
    "port": option(
        int, "Serve clients on this port. 0 chooses a free port.", default=DEFAULT_PORT, min=0, max=MAX_PORT
    ),
    "admin_port": option(
        int,
        "Serve the admin API, which `stagemesh admin` and `stagemesh top` use, on this port. 0 chooses a free port.",
        min=0,
        max=MAX_PORT,
        show_default="the port after --port",
    ),
    "settings": SETTINGS,
    "replicas": REPLICAS,
    "tls": option(
        Path,
        "Connect all processes by TLS, with certificates of the authority in this folder, which is created if it does "
        "not exist. Users connect with the certificates in its folders client and operator.",
        metavar="FOLDER",
    ),
    "metrics": flag("Serve metrics of the orchestrator and of each replica to Prometheus.", "--metrics"),
    "gateway": option(
        str,
        "Serve OpenAI's API at this address, such as 127.0.0.1:8000, by a gateway (docs/gateway.md). Port 0 chooses a "
        "free port.",
        metavar="HOST:PORT",
        show_default="no gateway",
    ),
    "jobs": flag(
        "Run a job server, which runs requests that survive restarts (docs/jobs.md). The pipeline file must set "
        "media.store.",
        "--jobs",
    ),
    **AS_JSON,
}


@with_parameters(_UP)
def up(
    *,
    pipeline: str,
    port: int,
    admin_port: int | None,
    settings: Sequence[str] | None,
    replicas: Sequence[str] | None,
    tls: Path | None,
    metrics: bool,
    gateway: str | None,
    jobs: bool,
    as_json: bool,
) -> None:
    """Run a pipeline on this machine until Ctrl-C. Start the orchestrator and every stage, and restart processes that
    exit.
    """
    from stagemesh.cli.launcher import Launcher
    from stagemesh.cli.local.process_display import make_display
    from stagemesh.pipeline import load_pipeline

    if gateway is not None:
        with needs_extra("gateway", of="--gateway"):
            # The packages that only the extra installs. The gateway's process names any other one.
            for package in ("fastapi", "uvicorn"):
                import_module(package)
    if jobs:
        with needs_extra("jobs", of="--jobs"):
            for package in ("alembic", "sqlalchemy"):
                import_module(package)
    overrides = read_overrides(settings, replicas)
    loaded = load_pipeline(pipeline, overrides=overrides)
    admin_listen = None if admin_port is None else f"{_HOST}:{admin_port}"
    authority = None if tls is None else open_authority(tls)
    display = make_display(as_json=as_json)
    began_s = time.monotonic()
    try:
        launcher = Launcher(
            loaded,
            listen=f"{_HOST}:{port}",
            admin_listen=admin_listen,
            overrides=overrides,
            listener=display.show,
            authority=authority,
            metrics=metrics,
            gateway_listen=gateway,
            jobs=jobs,
        )
        server = "" if launcher.endpoint == DEFAULT_SERVER else f" --server {launcher.endpoint}"
        client, operator = ("", "") if tls is None else (f" --tls {tls / CLIENT}", f" --tls {tls / OPERATOR}")
        hint = f'try: stagemesh generate "Tell me a story."{server}{client}'
        forever = asyncio.Event().wait
        asyncio.run(
            run_until_signal(
                launcher,
                forever,
                display=display,
                hint=hint,
                admin_endpoint=launcher.admin_endpoint,
                admin_options=operator,
            )
        )
        restarts = f", {display.restarts} restarts" if display.restarts else ""
        display.close(f"stopped {loaded.name} after {time.monotonic() - began_s:.0f} s{restarts}")
    finally:
        display.close()


def open_authority(folder: Path) -> "Authority":
    """Returns the authority in a folder, after it has issued certificates for the users of this machine."""
    from stagemesh.cli.launcher.certificates import Authority

    authority = Authority(folder)
    for role in (CLIENT, OPERATOR):
        authority.issue(folder / role, [f"{role}/local"])
    return authority


async def run_until_signal(
    launcher: "Launcher",
    work: Callable[[], Coroutine[Any, Any, _Result]],
    *,
    display: "Display",
    hint: str,
    admin_endpoint: str = "",
    admin_options: str = "",
) -> _Result | None:
    """Runs a pipeline, and calls `work` when the pipeline is ready.

    Stops the pipeline when `work` ends or when the process receives SIGINT or SIGTERM. Returns the result of `work`, or
    None if a signal arrived before `work` ended.

    - `hint` is the text that `display` shows when the pipeline is ready.
    - `admin_endpoint` is the address for operators that `display` shows. If it is empty, no address is shown.
    - `admin_options` are the options with which commands for operators connect.
    """
    from stagemesh.cli.local.process_display import Serving

    pass  # import removed

    stopping = stop_on_signals()
    async with launcher.running() as logs:
        edges = await result_before(stopping, launcher.wait_ready)
        if edges is None:
            return None
        display.ready(
            Serving(
                launcher.endpoint,
                edges,
                hint=hint,
                logs=logs,
                admin_endpoint=admin_endpoint,
                admin_options=admin_options,
                metrics_endpoints=launcher.metrics_endpoints,
                gateway_url=f"http://{launcher.gateway_endpoint}/v1" if launcher.gateway_endpoint else "",
            )
        )
        return await result_before(stopping, work)
    raise AssertionError("the launcher ends the block only by an error")


_Work = TypeVar("_Work")


def stop_on_signals() -> asyncio.Event:
    """Returns an event that is set when the process receives SIGINT or SIGTERM.

    After this call, these signals no longer interrupt or end the process.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    # In a container, the command line has blocked SIGTERM.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return stopping


async def result_before(stopping: asyncio.Event, work: Callable[[], Coroutine[Any, Any, _Work]]) -> _Work | None:
    """Runs `work` and returns the result of `work`, or None if `stopping` is set first.

    Cancels `work` if `stopping` is set before `work` has finished.
    """
    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(work())
        waiting = tasks.create_task(stopping.wait())
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        finished = working.done()
        working.cancel()
        waiting.cancel()
    return working.result() if finished else None
