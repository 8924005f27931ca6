"""`stagemesh demo`: starts a pipeline, runs one prompt, and stops the pipeline."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from stagemesh.common.errors import InternalError
from stagemesh.orchestrator.cli.error_output import EXIT_INTERRUPTED, AsJson
from stagemesh.orchestrator.cli.generate import PARAMETERS as GENERATE
from stagemesh.orchestrator.cli.generate import client_arguments, show_result, stream
from stagemesh.orchestrator.cli.options import PipelineName, Replicas, Settings, read_overrides
from stagemesh.orchestrator.cli.parameters import REQUIRED, Parameter, option

if TYPE_CHECKING:
    from stagemesh.client import GenerateArguments, Result
    from stagemesh.orchestrator.cli.output_sinks import Sinks
    from stagemesh.orchestrator.cli.process_display import Display
    from stagemesh.orchestrator.spec import Pipeline


PARAMETERS: Mapping[str, Parameter] = {
    "pipeline": Parameter(PipelineName),
    "prompt": option(str, "Set the prompt to send to the pipeline.", default=REQUIRED, metavar="TEXT"),
    **{name: GENERATE[name] for name in ("audio", "image", "negative_prompt", "max_tokens", "seed")},
    "settings": Parameter(Settings, None),
    "replicas": Parameter(Replicas, None),
    "timeout": option(
        float, "Fail if the request takes longer than this number of seconds.", default=300.0, metavar="SECONDS"
    ),
    "as_json": Parameter(AsJson, False),
}


def demo(**values: Any) -> None:
    """Start a pipeline on this machine, send it a prompt, print the outputs, and stop the pipeline."""
    from stagemesh.orchestrator.cli.output_sinks import Sinks
    from stagemesh.orchestrator.cli.process_display import make_display
    from stagemesh.orchestrator.spec import load_pipeline

    overrides = read_overrides(values["settings"], values["replicas"])
    loaded = load_pipeline(values["pipeline"], overrides=overrides)
    audio, image, as_json = values["audio"], values["image"], values["as_json"]
    display = make_display(as_json=as_json)
    with Sinks(folder=None, audio=audio, image=image, quiet=as_json) as sinks:
        run = _DemoRun(
            values["prompt"],
            arguments=client_arguments(values),
            timeout_s=values["timeout"],
            sinks=sinks,
            display=display,
        )
        try:
            asyncio.run(run.run(loaded, overrides=overrides))
        finally:
            display.close()
    if run.result is None:
        raise typer.Exit(EXIT_INTERRUPTED)
    show_result(run.result, sinks, as_json=as_json)
    for kind, path, produced in (("audio", audio, run.result.audios), ("image", image, run.result.images)):
        if path is not None and not produced:
            raise InternalError(
                f"the pipeline produced no {kind}, so {path} was not written; run `stagemesh pipeline graph` to see "
                "its outputs"
            )


class _DemoRun:
    """One run of the demo. `result` is None until the request has finished, and if the run was interrupted."""

    def __init__(
        self,
        prompt: str,
        *,
        arguments: "GenerateArguments",
        timeout_s: float,
        sinks: "Sinks",
        display: "Display",
    ) -> None:
        self._prompt = prompt
        self._arguments = arguments
        self._timeout_s = timeout_s
        self._sinks = sinks
        self._display = display
        self._endpoint = ""
        self.result: Result | None = None

    async def run(self, pipeline: "Pipeline", *, overrides: "Mapping[str, str]") -> None:
        """Starts the pipeline, sends the prompt, and stops the pipeline."""
        from stagemesh.orchestrator.cli.signals import done_before, stop_on_signals
        from stagemesh.orchestrator.launcher import Launcher

        stopping = stop_on_signals()
        launcher = Launcher(pipeline, listen="127.0.0.1:0", overrides=overrides, listener=self._display.show)
        self._endpoint = launcher.endpoint
        async with launcher.running():
            if await done_before(stopping, launcher.wait_ready):
                self._display.ready(launcher.endpoint, edges=launcher.edges, hint=f"prompt: {self._prompt}")
                await done_before(stopping, self._ask)

    async def _ask(self) -> None:
        from stagemesh.client import AsyncClient

        async with AsyncClient(self._endpoint) as client:
            self.result = await stream(
                client, self._prompt, arguments=self._arguments, timeout_s=self._timeout_s, sinks=self._sinks
            )
