"""`stagemesh up` and `stagemesh demo`: run a pipeline on this machine, until a signal arrives or for one prompt."""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from stagemesh.cli.requests.generate import GENERATE, run_request
from stagemesh.cli.requests.request_options import client_arguments
from stagemesh.cli.requests.result_output import show_result
from stagemesh.cli.terminal.contexts import DEFAULT_PORT, DEFAULT_SERVER, MAX_PORT
from stagemesh.cli.terminal.error_output import AS_JSON
from stagemesh.cli.terminal.options import REQUIRED, Kind, Parameters, flag, option, with_parameters
from stagemesh.cli.terminal.pipeline_options import PIPELINE, REPLICAS, SETTINGS, read_overrides
from stagemesh.common.errors import ExitCode, InternalError, needs_extra
from stagemesh.common.tasks import result_before

if TYPE_CHECKING:
    from stagemesh.cli.launcher import Launcher
    from stagemesh.cli.launcher.certificates import Authority
    from stagemesh.cli.local.process_display import Display
    from stagemesh.client import Result
    from stagemesh.pipeline import Pipeline


_HOST = "127.0.0.1"
CLIENT, OPERATOR = "client", "operator"
"""The folders with the certificates of users, within that of `--tls`."""
_PACKAGES = {"gateway": ("fastapi", "uvicorn"), "jobs": ("alembic", "sqlalchemy")}
"""The packages that only an extra installs, by the name of the extra. Its process names any other package it lacks."""
_Result = TypeVar("_Result")


_UP: Parameters = {
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
        Kind.FOLDER,
        "Connect all processes by TLS, with certificates of the authority in this folder, which is created if it does "
        "not exist. Users connect with the certificates in its folders client and operator.",
    ),
    "metrics": flag(
        "Serve metrics of the orchestrator, of each replica and of the gateway to Prometheus.", "--metrics"
    ),
    "gateway": option(
        Kind.ADDRESS,
        "Serve OpenAI's API at this address, such as 127.0.0.1:8000, by a gateway (docs/gateway.md). Port 0 chooses a "
        "free port.",
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
def up(**values: Any) -> None:
    """Run a pipeline on this machine until Ctrl-C. Start the orchestrator and every stage, and restart processes that
    exit.
    """
    from stagemesh.cli.launcher import Launcher
    from stagemesh.cli.local.process_display import make_display
    from stagemesh.pipeline import load_pipeline

    for extra, packages in _PACKAGES.items():
        with needs_extra(extra, of=f"--{extra}"):
            for package in packages if values[extra] else ():
                import_module(package)
    overrides = read_overrides(values["settings"], values["replicas"])
    loaded = load_pipeline(values["pipeline"], overrides=overrides)
    admin_port, tls = values["admin_port"], values["tls"]
    authority = None if tls is None else open_authority(tls)
    display = make_display(as_json=values["as_json"])
    began_s = time.monotonic()
    try:
        launcher = Launcher(
            loaded,
            listen=f"{_HOST}:{values['port']}",
            admin_listen=None if admin_port is None else f"{_HOST}:{admin_port}",
            overrides=overrides,
            listener=display.show,
            authority=authority,
            metrics=values["metrics"],
            gateway_listen=values["gateway"],
            jobs=values["jobs"],
        )
        server = "" if launcher.endpoint == DEFAULT_SERVER else f" --server {launcher.endpoint}"
        client, operator = ("", "") if tls is None else (f" --tls {tls / CLIENT}", f" --tls {tls / OPERATOR}")
        hint = f'try: stagemesh generate "Tell me a story."{server}{client}'
        asyncio.run(_run_until_signal(launcher, asyncio.Event().wait, display=display, hint=hint, operator=operator))
        restarts = f", {display.restarts} restarts" if display.restarts else ""
        display.close(f"stopped {loaded.name} after {time.monotonic() - began_s:.0f} s{restarts}")
    finally:
        display.close()


_DEMO: Parameters = {
    "pipeline": PIPELINE,
    "prompt": option(Kind.TEXT, "Set the prompt to send to the pipeline.", default=REQUIRED),
    **{name: GENERATE[name] for name in ("audio", "image", "negative_prompt", "max_tokens", "seed")},
    "settings": SETTINGS,
    "replicas": REPLICAS,
    "timeout": option(Kind.SECONDS, "Fail if the request takes longer than this number of seconds.", default=300.0),
    **AS_JSON,
}


@with_parameters(_DEMO)
def demo(**values: Any) -> None:
    """Start a pipeline on this machine, send it a prompt, print the outputs, and stop the pipeline."""
    from stagemesh.cli.requests.output_sinks import Sinks
    from stagemesh.pipeline import load_pipeline

    overrides = read_overrides(values["settings"], values["replicas"])
    loaded = load_pipeline(values["pipeline"], overrides=overrides)
    prompt, audio, image, as_json = values["prompt"], values["audio"], values["image"], values["as_json"]
    arguments = client_arguments(values)
    with Sinks(folder=None, audio=audio, image=image, quiet=as_json) as sinks:

        def request(endpoint: str) -> "Coroutine[Any, Any, Result]":
            return run_request([endpoint], prompt, arguments=arguments, timeout_s=values["timeout"], sinks=sinks)

        result = run_for(loaded, request, overrides=overrides, hint=f"prompt: {prompt}", as_json=as_json)
    if result is None:
        raise typer.Exit(ExitCode.INTERRUPTED)
    show_result(result, sinks, as_json=as_json)
    for kind, path, produced in (("audio", audio, result.audios), ("image", image, result.images)):
        if path is not None and not produced:
            raise InternalError(
                f"the pipeline produced no {kind}, so {path} was not written; run `stagemesh pipeline graph` to see "
                "its outputs"
            )


def open_authority(folder: Path) -> "Authority":
    """Returns the authority in a folder, after it has issued certificates for the users of this machine."""
    from stagemesh.cli.launcher.certificates import Authority

    authority = Authority(folder)
    for role in (CLIENT, OPERATOR):
        authority.issue(folder / role, [f"{role}/local"])
    return authority


def run_for(
    pipeline: "Pipeline",
    work: Callable[[str], Coroutine[Any, Any, _Result]],
    *,
    overrides: Mapping[str, str],
    hint: str,
    as_json: bool,
) -> _Result | None:
    """Runs a pipeline on a free port, calls `work` with its address, and stops the pipeline when `work` ends.

    Returns the result of `work`, or None if SIGINT or SIGTERM arrived before `work` ended. `overrides` are those with
    which `pipeline` was loaded. `hint` is the text that is shown when the pipeline is ready.
    """
    from stagemesh.cli.launcher import Launcher
    from stagemesh.cli.local.process_display import make_display

    display = make_display(as_json=as_json)
    try:
        launcher = Launcher(pipeline, listen=f"{_HOST}:0", overrides=overrides, listener=display.show)
        return asyncio.run(_run_until_signal(launcher, partial(work, launcher.endpoint), display=display, hint=hint))
    finally:
        display.close()


async def _run_until_signal(
    launcher: "Launcher",
    work: Callable[[], Coroutine[Any, Any, _Result]],
    *,
    display: "Display",
    hint: str,
    operator: str | None = None,
) -> _Result | None:
    """Runs a pipeline, and calls `work` when the pipeline is ready.

    Stops the pipeline when `work` ends or when the process receives SIGINT or SIGTERM. Returns the result of `work`, or
    None if a signal arrived before `work` ended.

    - `hint` is the text that `display` shows when the pipeline is ready.
    - `operator` are the options with which commands for operators connect. If it is None, the address for operators is
      not shown.
    """
    from stagemesh.common.process.lifecycle import stop_on_signals

    stopping = stop_on_signals()
    # The files of a run contain requests and keys.
    umask = os.umask(0o077)
    try:
        async with launcher.running() as logs:
            edges = await result_before(stopping, launcher.wait_ready())
            if edges is None:
                return None
            display.ready(launcher, edges, hint=hint, logs=logs, operator=operator)
            return await result_before(stopping, work())
        raise AssertionError("the launcher ends the block only by an error")
    finally:
        os.umask(umask)
