"""`stagemesh up` and `stagemesh demo`: run a pipeline on this machine, until Ctrl-C or for one prompt."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from stagemesh.common.errors import InternalError
from stagemesh.orchestrator.cli import generate
from stagemesh.orchestrator.cli.error_output import EXIT_INTERRUPTED, AsJson
from stagemesh.orchestrator.cli.options import (
    DEFAULT_PORT,
    DEFAULT_SERVER,
    REQUIRED,
    Parameter,
    PipelineName,
    Replicas,
    Settings,
    option,
    read_overrides,
)

if TYPE_CHECKING:
    from stagemesh.orchestrator.cli.process_display import Display
    from stagemesh.orchestrator.launcher import Launcher

_HOST = "127.0.0.1"
_Result = TypeVar("_Result")

DEMO_PARAMETERS: Mapping[str, Parameter] = {
    "pipeline": Parameter(PipelineName),
    "prompt": option(str, "Set the prompt to send to the pipeline.", default=REQUIRED, metavar="TEXT"),
    **{name: generate.PARAMETERS[name] for name in ("audio", "image", "negative_prompt", "max_tokens", "seed")},
    "settings": Parameter(Settings, None),
    "replicas": Parameter(Replicas, None),
    "timeout": option(
        float, "Fail if the request takes longer than this number of seconds.", default=300.0, metavar="SECONDS"
    ),
    "as_json": Parameter(AsJson, False),
}


def up(
    pipeline: PipelineName,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Serve clients on this port. 0 chooses a free port.")
    ] = DEFAULT_PORT,
    admin_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Serve the admin API, which `stagemesh admin` and `stagemesh top` use, on this port. 0 chooses a free "
            "port.",
            show_default="the port after --port",
        ),
    ] = None,
    settings: Settings = None,
    replicas: Replicas = None,
    as_json: AsJson = False,
) -> None:
    """Run a pipeline on this machine until Ctrl-C. Start the orchestrator and every stage, and restart processes that
    exit.
    """
    from stagemesh.orchestrator.cli.process_display import make_display
    from stagemesh.orchestrator.launcher import Launcher
    from stagemesh.orchestrator.spec import load_pipeline

    overrides = read_overrides(settings, replicas)
    loaded = load_pipeline(pipeline, overrides=overrides)
    admin_listen = None if admin_port is None else f"{_HOST}:{admin_port}"
    display = make_display(as_json=as_json)
    began_s = time.monotonic()
    try:
        launcher = Launcher(
            loaded, listen=f"{_HOST}:{port}", admin_listen=admin_listen, overrides=overrides, listener=display.show
        )
        server = "" if launcher.endpoint == DEFAULT_SERVER else f" --server {launcher.endpoint}"
        hint = f'try: stagemesh generate "Tell me a story."{server}'
        forever = asyncio.Event().wait
        asyncio.run(_run(launcher, forever, display=display, hint=hint, admin_endpoint=launcher.admin_endpoint))
        restarts = f", {display.restarts} restarts" if display.restarts else ""
        display.close(f"stopped {loaded.name} after {time.monotonic() - began_s:.0f} s{restarts}")
    finally:
        display.close()


def demo(**values: Any) -> None:
    """Start a pipeline on this machine, send it a prompt, print the outputs, and stop the pipeline."""
    from stagemesh.orchestrator.cli.output_sinks import Sinks
    from stagemesh.orchestrator.cli.process_display import make_display
    from stagemesh.orchestrator.launcher import Launcher
    from stagemesh.orchestrator.spec import load_pipeline

    overrides = read_overrides(values["settings"], values["replicas"])
    loaded = load_pipeline(values["pipeline"], overrides=overrides)
    prompt, audio, image, as_json = values["prompt"], values["audio"], values["image"], values["as_json"]
    arguments = generate.client_arguments(values)
    display = make_display(as_json=as_json)
    with Sinks(folder=None, audio=audio, image=image, quiet=as_json) as sinks:
        try:
            launcher = Launcher(loaded, listen=f"{_HOST}:0", overrides=overrides, listener=display.show)
            request = partial(
                generate.run_request,
                [launcher.endpoint],
                prompt,
                arguments=arguments,
                timeout_s=values["timeout"],
                sinks=sinks,
            )
            result = asyncio.run(_run(launcher, request, display=display, hint=f"prompt: {prompt}"))
        finally:
            display.close()
    if result is None:
        raise typer.Exit(EXIT_INTERRUPTED)
    generate.show_result(result, sinks, as_json=as_json)
    for kind, path, produced in (("audio", audio, result.audios), ("image", image, result.images)):
        if path is not None and not produced:
            raise InternalError(
                f"the pipeline produced no {kind}, so {path} was not written; run `stagemesh pipeline graph` to see "
                "its outputs"
            )


async def _run(
    launcher: "Launcher",
    work: Callable[[], Coroutine[Any, Any, _Result]],
    *,
    display: "Display",
    hint: str,
    admin_endpoint: str = "",
) -> _Result | None:
    """Runs a pipeline, and calls `work` when the pipeline is ready.

    Stops the pipeline when `work` ends or when the process receives SIGINT or SIGTERM. Returns the result of `work`, or
    None if a signal arrived before `work` ended.

    - `hint` is the text that `display` shows when the pipeline is ready.
    - `admin_endpoint` is the address for operators that `display` shows. If it is empty, no address is shown.
    """
    from stagemesh.orchestrator.cli.signals import result_before, stop_on_signals

    stopping = stop_on_signals()
    async with launcher.running():
        edges = await result_before(stopping, launcher.wait_ready)
        if edges is None:
            return None
        display.ready(launcher.endpoint, edges=edges, hint=hint, admin_endpoint=admin_endpoint)
        return await result_before(stopping, work)
    raise AssertionError("the launcher ends the block only by an error")
