"""`stagemesh demo`: runs a pipeline on this machine for one prompt."""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import typer

from stagemesh.cli.local.up import run_until_signal
from stagemesh.cli.requests.generate import GENERATE, run_request
from stagemesh.cli.requests.request_options import client_arguments
from stagemesh.cli.requests.result_output import show_result
from stagemesh.cli.terminal.error_output import AS_JSON
from stagemesh.cli.terminal.options import (
    PIPELINE,
    REPLICAS,
    REQUIRED,
    SETTINGS,
    Parameter,
    option,
    read_overrides,
    with_parameters,
)
from stagemesh.common.errors import ExitCode, InternalError

_DEMO: Mapping[str, Parameter] = {
    "pipeline": PIPELINE,
    "prompt": option(str, "Set the prompt to send to the pipeline.", default=REQUIRED, metavar="TEXT"),
    **{name: GENERATE[name] for name in ("audio", "image", "negative_prompt", "max_tokens", "seed")},
    "settings": SETTINGS,
    "replicas": REPLICAS,
    "timeout": option(
        float, "Fail if the request takes longer than this number of seconds.", default=300.0, metavar="SECONDS"
    ),
    **AS_JSON,
}


@with_parameters(_DEMO)
def demo(**values: Any) -> None:
    """Start a pipeline on this machine, send it a prompt, print the outputs, and stop the pipeline."""
    from stagemesh.cli.launcher import Launcher
    from stagemesh.cli.local.process_display import make_display
    from stagemesh.cli.requests.output_sinks import Sinks
    from stagemesh.pipeline import load_pipeline

    overrides = read_overrides(values["settings"], values["replicas"])
    loaded = load_pipeline(values["pipeline"], overrides=overrides)
    prompt, audio, image, as_json = values["prompt"], values["audio"], values["image"], values["as_json"]
    arguments = client_arguments(values)
    display = make_display(as_json=as_json)
    with Sinks(folder=None, audio=audio, image=image, quiet=as_json) as sinks:
        try:
            launcher = Launcher(loaded, listen="127.0.0.1:0", overrides=overrides, listener=display.show)
            request = partial(
                run_request,
                [launcher.endpoint],
                prompt,
                arguments=arguments,
                timeout_s=values["timeout"],
                sinks=sinks,
            )
            result = asyncio.run(run_until_signal(launcher, request, display=display, hint=f"prompt: {prompt}"))
        finally:
            display.close()
    if result is None:
        raise typer.Exit(ExitCode.INTERRUPTED)
    show_result(result, sinks, as_json=as_json)
    for kind, path, produced in (("audio", audio, result.audios), ("image", image, result.images)):
        if path is not None and not produced:
            raise InternalError(
                f"the pipeline produced no {kind}, so {path} was not written; run `stagemesh pipeline graph` to see "
                "its outputs"
            )
