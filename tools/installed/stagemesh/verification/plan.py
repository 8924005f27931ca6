"""The plan of `stagemesh verify`: stages with a reference implementation, and the compared outputs."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import TypeAdapter

from stagemesh.common.errors import InternalError, InvalidRequestError, error_class
from stagemesh.common.wire.tensors import Array
from stagemesh.verification.job import (
    Comparison,
    DeployedStage,
    VerificationJob,
    VerificationReport,
    VerificationRequest,
    VerifiedStage,
    reference_descriptors,
)

if TYPE_CHECKING:
    from stagemesh.client import Choice
    from stagemesh.pipeline import Pipeline

_MODULE = "stagemesh.verification"


@dataclass(frozen=True)
class ReferenceGroup:
    """The stages that one reference implementation verifies together."""

    reference: str
    stages: tuple[VerifiedStage, ...]


def find_groups(pipeline: "Pipeline", *, media: Sequence[str]) -> list[ReferenceGroup]:
    """Returns the groups of stages that have a reference implementation.

    `media` are the kinds of the requests' files. Raises InvalidRequestError (NO_REFERENCE) if there is no group, or if
    none accepts these files. Raises NotReadyError (LOAD_FAILED) if a model's config cannot be read.
    """
    stages = [
        DeployedStage(
            stage.name,
            stage.engine,
            stage.function or "",
            stage.model_path,
            stage.options,
            {name: spec.default for name, spec in stage.signature.options.items()},
            frozenset(name for name, spec in stage.signature.accepts.items() if not spec.ticket_kind),
            frozenset(stage.signature.emits),
        )
        for stage in pipeline.stages.values()
        if stage.model_path is not None
    ]
    known = reference_descriptors()
    usable = {name: reference for name, reference in known.items() if reference.media >= set(media)}
    groups = [
        ReferenceGroup(name, tuple(group)) for name, reference in usable.items() for group in reference.find(stages)
    ]
    if not groups:
        described = "; ".join(known[name].description for name in sorted(usable))
        requests = f"requests with {' and '.join(sorted(set(media)))}" if media else "requests"
        raise InvalidRequestError(
            f"no stage of pipeline {pipeline.name!r} has a reference implementation for {requests}; stages that can be "
            f"verified: {described or 'none'}",
            reason="NO_REFERENCE",
        )
    return groups


class ComparedOutputs:
    """The outputs of a pipeline that are compared, and the outputs that the pipeline file lacks."""

    def __init__(self, pipeline: "Pipeline", groups: Sequence[ReferenceGroup]) -> None:
        self._pipeline = pipeline
        sources = [
            f"{each.stage.name}.{output}" for group in groups for each in group.stages for output in each.outputs
        ]
        found = {
            output.source: name
            for name, output in pipeline.outputs.items()
            if not output.stored and output.media_type is None
        }
        self.names: Mapping[str, str] = {source: found[source] for source in sources if source in found}
        """The names of the outputs, by "stage.tensor"."""
        missing = [source for source in sources if source not in found]
        self.overrides: Mapping[str, str] = {f"outputs.verify-{at}": source for at, source in enumerate(missing)}
        """The overrides of the pipeline file that add the missing outputs."""

    def tensors(self, choice: "Choice") -> Iterator[tuple[str, Array]]:
        """Yields "stage.tensor" and the tensor of each output of a request."""
        for source, name in self.names.items():
            if name in choice.tokens:
                yield source, np.asarray(choice.tokens[name], np.int32)
            elif name in choice.audios:
                yield source, choice.audios[name].samples
            elif name in choice.images:
                yield source, np.frombuffer(choice.images[name][-1].data, np.uint8)
            elif name in choice.tensors:
                yield source, self._numbers(source, [each.tensor for each in choice.tensors[name]])

    def _numbers(self, source: str, parts: Sequence[Array]) -> Array:
        stage, _, tensor = source.partition(".")
        whole = np.concatenate(parts)
        if self._pipeline.stages[stage].signature.emits[tensor].spec.dtype == "bfloat16":
            return (whole.astype(np.uint32) << 16).view(np.float32)
        return whole if whole.dtype.kind == "i" else whole.astype(np.float32)


def compare(
    group: ReferenceGroup,
    requests: Sequence[VerificationRequest],
    tensors: Mapping[str, Array],
    *,
    device: Literal["auto", "cpu", "cuda"],
) -> tuple[Comparison, ...]:
    """Compares outputs with a reference implementation, in a new process, which prints progress to stderr.

    `tensors` are named as in a VerificationJob. Raises the error of the process, and InternalError if the process ends
    without a report.
    """
    with tempfile.TemporaryDirectory(prefix="stagemesh-verify-") as name:
        folder = Path(name)
        job = VerificationJob(
            group.reference, group.stages, tuple(requests), device, folder / "outputs.npz", folder / "report.json"
        )
        with job.outputs.open("wb") as file:
            np.savez(file, **dict(tensors))  # type: ignore[arg-type]  # annotated as if it had other keyword arguments
        path = folder / "job.json"
        path.write_bytes(TypeAdapter(VerificationJob).dump_json(job))
        command = [sys.executable, "-m", _MODULE, str(path)]
        # Libraries may print to stdout, which is for the results.
        ended = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
        if not job.report.exists():
            raise InternalError(f"the process of the reference ended with status {ended.returncode}; see its messages")
        report = TypeAdapter(VerificationReport).validate_json(job.report.read_bytes())
    if report.code:
        raise error_class(report.code, report.reason)(report.message, reason=report.reason)
    return report.comparisons
