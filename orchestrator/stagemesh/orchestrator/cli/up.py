"""`stagemesh up`: runs a pipeline on this machine."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from stagemesh.orchestrator.cli.error_output import AsJson
from stagemesh.orchestrator.cli.options import (
    DEFAULT_PORT,
    DEFAULT_SERVER,
    PipelineName,
    Replicas,
    Settings,
    read_overrides,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stagemesh.orchestrator.cli.process_display import Display
    from stagemesh.orchestrator.spec import Pipeline

_HOST = "127.0.0.1"


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
            help="Serve operators on this port. 0 chooses a free port.",
            show_default="the port after --port",
        ),
    ] = None,
    settings: Settings = None,
    replicas: Replicas = None,
    as_json: AsJson = False,
) -> None:
    """Run a pipeline on this machine until Ctrl-C. Start the orchestrator and every stage, and restart processes that
    end.
    """
    from stagemesh.orchestrator.cli.process_display import make_display
    from stagemesh.orchestrator.spec import load_pipeline

    overrides = read_overrides(settings, replicas)
    loaded = load_pipeline(pipeline, overrides=overrides)
    display = make_display(as_json=as_json)
    try:
        asyncio.run(_serve(loaded, port=port, admin_port=admin_port, overrides=overrides, display=display))
    finally:
        display.close()


async def _serve(
    pipeline: "Pipeline",
    *,
    port: int,
    admin_port: int | None,
    overrides: "Mapping[str, str]",
    display: "Display",
) -> None:
    from stagemesh.orchestrator.cli.signals import done_before, stop_on_signals
    from stagemesh.orchestrator.launcher import Launcher

    stopping = stop_on_signals()
    launcher = Launcher(
        pipeline,
        listen=f"{_HOST}:{port}",
        admin_listen=None if admin_port is None else f"{_HOST}:{admin_port}",
        overrides=overrides,
        listener=display.show,
    )
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with launcher.running():
        if await done_before(stopping, launcher.wait_ready):
            display.ready(
                launcher.endpoint,
                edges=launcher.edges,
                hint=_hint(launcher.endpoint),
                admin_endpoint=launcher.admin_endpoint,
            )
            await stopping.wait()
    restarts = f", {display.restarts} restarts" if display.restarts else ""
    display.close(f"stopped {pipeline.name} after {loop.time() - began_s:.0f} s{restarts}")


def _hint(endpoint: str) -> str:
    where = "" if endpoint == DEFAULT_SERVER else f" --server {endpoint}"
    return f'try: stagemesh generate "Tell me a story."{where}'
