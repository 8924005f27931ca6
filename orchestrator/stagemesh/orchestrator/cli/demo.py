"""`stagemesh demo`: everything that the README shows, in one command."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from stagemesh.common.errors import InternalError
from stagemesh.orchestrator.cli.error_output import EXIT_INTERRUPTED, AsJson
from stagemesh.orchestrator.cli.generate import Audio, NegativePrompt, Picture, show_result, stream
from stagemesh.orchestrator.cli.options import PipelineName, Replicas, Settings, read_overrides
from stagemesh.orchestrator.cli.sampling import MaxTokens, Seed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stagemesh.client import GenerateArguments, Result
    from stagemesh.orchestrator.cli.output_sinks import Sinks
    from stagemesh.orchestrator.cli.process_display import Display
    from stagemesh.orchestrator.spec import Pipeline


def demo(
    pipeline: PipelineName,
    prompt: Annotated[str, typer.Option(help="What to ask.")],
    audio: Audio = None,
    image: Picture = None,
    negative_prompt: NegativePrompt = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    settings: Settings = None,
    replicas: Replicas = None,
    timeout: Annotated[float, typer.Option(help="Seconds that the request may take.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Starts a pipeline, sends it a prompt, shows what comes, and stops."""
    from stagemesh.orchestrator.cli.output_sinks import Sinks
    from stagemesh.orchestrator.cli.process_display import make_display
    from stagemesh.orchestrator.spec import load_pipeline

    overrides = read_overrides(settings, replicas)
    loaded = load_pipeline(pipeline, overrides=overrides)
    arguments: GenerateArguments = {
        "max_tokens": max_tokens,
        "seed": seed,
        "negative_prompt": negative_prompt or "",
    }
    display = make_display(as_json=as_json)
    with Sinks(folder=None, audio=audio, image=image, quiet=as_json) as sinks:
        show = _Show(prompt, arguments=arguments, timeout_s=timeout, sinks=sinks, display=display)
        try:
            asyncio.run(show.run(loaded, overrides=overrides))
        finally:
            display.close()
    if show.result is None:
        raise typer.Exit(EXIT_INTERRUPTED)
    show_result(show.result, sinks, as_json=as_json)
    for what, path, given in (("audio", audio, show.result.audios), ("picture", image, show.result.images)):
        if path is not None and not given:
            raise InternalError(
                f"the pipeline gave no {what}, so that {path} was not written; see `stagemesh pipeline graph`"
            )


class _Show:
    """One run of the demo; `result` is None when it was interrupted."""

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
        """Starts the pipeline, asks, stops it."""
        from stagemesh.orchestrator.cli.signals import done_before, stop_on_signals
        from stagemesh.orchestrator.launcher import Launcher

        stopping = stop_on_signals()
        launcher = Launcher(pipeline, listen="127.0.0.1:0", overrides=overrides, listener=self._display.show)
        self._endpoint = launcher.endpoint
        async with launcher.running():
            if await done_before(stopping, launcher.wait_ready):
                self._display.ready(launcher.endpoint, edges=launcher.edges, hint=f"asking: {self._prompt}")
                await done_before(stopping, self._ask)

    async def _ask(self) -> None:
        from stagemesh.client import AsyncClient

        async with AsyncClient(self._endpoint) as client:
            self.result = await stream(
                client, self._prompt, arguments=self._arguments, timeout_s=self._timeout_s, sinks=self._sinks
            )
