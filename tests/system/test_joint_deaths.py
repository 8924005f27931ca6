"""Several processes of a deployment are killed at the same time while a request runs."""

import itertools
import signal
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from stagemesh.client import Result
from tests.deployment import Deployment, deployed, deployed_for_module, eventually
from tests.system.pipelines import pipeline_file
from tests.system.reading import read, steps_of

# `writer` finishes long before `last`, which has then received only a part of its chunks.
_PIPELINE = """\
pipeline: joint
stages:
  writer: {engine: fake, function: source, options: {steps: 24, step_s: 0.01, size_bytes: 1000}}
  middle: {engine: fake, function: relay, options: {size_bytes: 1000}}
  last: {engine: fake, function: relay, options: {size_bytes: 1000, step_s: 0.1}}
edges:
  - {from: writer, to: middle}
  - {from: middle, to: last}
outputs: {text: last}
"""
_PROCESSES = ("orchestrator", "writer-0", "middle-0", "last-0")

up = deployed_for_module(lambda folder: pipeline_file(folder, _PIPELINE, name="joint"))


@pytest.fixture(scope="module")
def undisturbed(up: Deployment) -> Result:
    with up.client() as client:
        return client.generate("hello", seed=7).result()


@pytest.fixture(autouse=True)
def _released(up: Deployment) -> Iterator[None]:
    yield
    up.wait(Deployment.all_ready)
    eventually(up.idle, timeout_s=10)


def _kill(up: Deployment, names: Iterable[str]) -> None:
    for name in names:
        up.kill(name)


_SAMPLE = {"orchestrator+last-0+8", "orchestrator+middle-0+1", "orchestrator+middle-0+last-0+8"}
"""The cases that do not run only in the soak, by their ids."""


def _cases() -> Iterator[Any]:
    for size, after in itertools.product((2, 3), (1, 8)):
        for names in itertools.combinations(_PROCESSES, size):
            case = "+".join((*names, str(after)))
            yield pytest.param(names, after, id=case, marks=() if case in _SAMPLE else pytest.mark.soak)


@pytest.mark.parametrize(("killed", "after"), list(_cases()))
def test_processes_that_die_together_change_nothing(
    up: Deployment, undisturbed: Result, killed: tuple[str, ...], after: int
) -> None:
    with up.client() as client:
        call = client.generate("hello", seed=7, timeout_s=20)
        result = read(call, {after: partial(_kill, up, killed)})
    assert result.text == undisturbed.text


def test_an_orchestrator_continues_although_the_one_before_had_replaced_a_stage_that_still_ran(
    tmp_path: Path, undisturbed: Result
) -> None:
    pipeline = _PIPELINE.replace("last: {", "last: {replicas: 2, ")
    with deployed(pipeline_file(tmp_path, pipeline, name="moved")) as up, up.client() as client:
        call = client.generate("hello", seed=7, timeout_s=20)

        def attempts() -> list[str]:
            steps = steps_of(up, call.request_id)
            return [each.replica for each in steps if each.stage == "last" and each.HasField("accepted_s")]

        def replace_and_kill() -> None:
            (first,) = attempts()
            stopped = psutil.Process(up.process_id(first))
            stopped.send_signal(signal.SIGSTOP)
            eventually(lambda: len(attempts()) == 2, timeout_s=10)
            # The orchestrator has dropped its connection, by which it would have cancelled the first attempt.
            stopped.send_signal(signal.SIGCONT)
            up.kill("orchestrator")

        result = read(call, {4: replace_and_kill})
        causes = [each.error.message for each in steps_of(up, call.request_id) if each.stage == "last"]
    assert result.text == undisturbed.text
    assert causes == ["another orchestrator has replaced stage 'last'", ""]
