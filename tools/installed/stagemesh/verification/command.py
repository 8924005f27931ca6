"""`stagemesh verify`: compares the outputs of a pipeline with those of a reference implementation."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from stagemesh.cli.local.up import run_for
from stagemesh.cli.terminal.contexts import split_addresses
from stagemesh.cli.terminal.error_output import AS_JSON
from stagemesh.cli.terminal.options import Kind, Parameters, option, with_parameters
from stagemesh.cli.terminal.output import print_all, print_json
from stagemesh.cli.terminal.pipeline_options import PIPELINE, SETTINGS, read_overrides
from stagemesh.cli.terminal.tables import Column, fields, make_table, number, numbers
from stagemesh.common.errors import ExitCode, InvalidRequestError

if TYPE_CHECKING:
    from stagemesh.client import GenerateArguments
    from stagemesh.client.content import Medium
    from stagemesh.client.requests import StageArguments
    from stagemesh.common.wire.tensors import Array
    from stagemesh.verification.job import Comparison, VerificationRequest
    from stagemesh.verification.plan import ComparedOutputs, ReferenceGroup

MAX_FRAMES = 300
"""References decode at most this number of audio frames at once. Some lose samples between such parts."""

_VERIFY: Parameters = {
    "pipeline": PIPELINE,
    "prompt": option([Kind.TEXT], "Verify this prompt. Repeatable. Verifies three built-in prompts if omitted."),
    "media": option([Kind.INPUT_FILE], "Add this image or audio file to each request, before the prompt. Repeatable."),
    "max_tokens": option(int, "Compare at most this number of tokens of each text.", default=32, min=1),
    "max_frames": option(
        int, "Compare at most this number of frames of the audio codec.", default=32, min=1, max=MAX_FRAMES
    ),
    "seed": option(int, "Set the random seed of each request.", default=0, min=0),
    "server": option(
        Kind.ADDRESS,
        "Send the requests to the running pipeline at this address. Starts the pipeline if omitted. PIPELINE must be "
        "the file that the running pipeline was started with.",
    ),
    "device": option(
        Literal["auto", "cpu", "cuda"],
        "Run the reference implementation on this device. auto selects the GPUs if the machine has any, otherwise the "
        "CPU.",
        default="auto",
    ),
    "settings": SETTINGS,
    "timeout": option(Kind.SECONDS, "Fail if a request takes longer than this number of seconds.", default=600.0),
    **AS_JSON,
}
_STYLES = {"equal": "green", "ties": "yellow", "differs": "red", "skipped": "dim"}


@with_parameters(_VERIFY)
def verify(**values: Any) -> None:
    """Compare the outputs of a pipeline with those of a reference implementation, stage by stage.

    Exit with status 1 if an output differs by more than the tolerance, or if no output could be compared.
    """
    from stagemesh.client import ImageFile
    from stagemesh.pipeline import load_pipeline
    from stagemesh.verification.job import PROMPTS, VerificationRequest
    from stagemesh.verification.plan import ComparedOutputs, compare, find_groups

    overrides = read_overrides(values["settings"])
    loaded = load_pipeline(values["pipeline"], overrides=overrides)
    media = _read_media(values["media"] or ())
    groups = find_groups(loaded, media=["image" if isinstance(each, ImageFile) else "audio" for each in media])
    outputs = ComparedOutputs(loaded, groups)
    if not values["server"]:
        overrides |= outputs.overrides
        loaded = load_pipeline(values["pipeline"], overrides=overrides)
        outputs = ComparedOutputs(loaded, groups)
    requests = [
        VerificationRequest(
            prompt, tuple(values["media"] or ()), values["seed"], values["max_tokens"], values["max_frames"]
        )
        for prompt in values["prompt"] or PROMPTS
    ]
    run = _Requests(requests, groups, outputs, media, values["timeout"]).run
    tensors: dict[str, Array] | None
    if values["server"]:
        tensors = asyncio.run(run(*_read_server(values["server"])))
    else:
        tensors = run_for(loaded, run, overrides=overrides, hint="verifying", as_json=values["as_json"])
    if tensors is None:
        raise typer.Exit(ExitCode.INTERRUPTED)
    comparisons = [each for group in groups for each in compare(group, requests, tensors, device=values["device"])]
    _show(comparisons, requests, as_json=values["as_json"])
    verdicts = {each.verdict for each in comparisons}
    if "differs" in verdicts or not verdicts - {"skipped"}:
        raise typer.Exit(ExitCode.FAILED)


def _read_media(paths: Sequence[Path]) -> list["Medium"]:
    """Reads the files of the requests. Raises InvalidRequestError if a file is a video or cannot be read."""
    from stagemesh.client import VideoFile, read_media

    media = [read_media(path) for path in paths]
    for path, medium in zip(paths, media, strict=True):
        if isinstance(medium, VideoFile):
            raise InvalidRequestError(
                f"--media {path} is a video; the reference selects other frames of a video; give images or audio"
            )
    return list(media)


@dataclass(frozen=True)
class _Requests:
    """The requests to a pipeline, one after another."""

    requests: "Sequence[VerificationRequest]"
    groups: "Sequence[ReferenceGroup]"
    outputs: "ComparedOutputs"
    media: "Sequence[Medium]"
    timeout_s: float

    async def run(self, *endpoints: str) -> "dict[str, Array]":
        """Runs all requests. Returns their outputs, named as in a VerificationJob."""
        from stagemesh.client import AsyncClient

        tensors: dict[str, Array] = {}
        async with AsyncClient(*endpoints) as client:
            for at, request in enumerate(self.requests):
                typer.echo(f"running request {at + 1} of {len(self.requests)}", err=True)
                prompt = [*self.media, request.prompt] if self.media else request.prompt
                result = await client.generate(prompt, timeout_s=self.timeout_s, **self._arguments(request)).result()
                tensors |= {f"{at}/{source}": tensor for source, tensor in self.outputs.tensors(result)}
        return tensors

    def _arguments(self, request: "VerificationRequest") -> "GenerateArguments":
        limits = {"tokens": request.max_tokens, "frames": request.max_frames}
        sampling = {each.stage.name: each.samples for group in self.groups for each in group.stages if each.samples}
        return {
            "seed": request.seed,
            "outputs": list(self.outputs.names.values()),
            "stages": {name: _greedy(limits[unit]) for name, unit in sampling.items()},
        }


def _greedy(max_tokens: int) -> "StageArguments":
    return {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": max_tokens,
    }


def _read_server(text: str) -> list[str]:
    try:
        return split_addresses(text)
    except ValueError as exc:
        raise typer.BadParameter(str(exc), param_hint="--server") from exc


def _show(comparisons: "Sequence[Comparison]", requests: "Sequence[VerificationRequest]", *, as_json: bool) -> None:
    if as_json:
        prompts = [each.prompt for each in requests]
        print_json({"event": "verified", "prompts": prompts, "comparisons": [asdict(each) for each in comparisons]})
        return
    columns = (
        number("request", lambda each: each.request + 1),
        *fields("stage", "output"),
        Column("verdict", lambda each: [(each.verdict, _STYLES[each.verdict])]),
        *numbers("compared", "differing"),
        number("difference", lambda each: f"{each.difference:.1e}" if each.limit else ""),
        number("limit", lambda each: f"{each.limit:.1e}" if each.limit else ""),
        *fields("detail"),
    )
    print_all(make_table(columns, comparisons))
    counts = {verdict: sum(each.verdict == verdict for each in comparisons) for verdict in _STYLES}
    typer.echo(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
