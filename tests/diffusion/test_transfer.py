"""An interrupted image resumes on another replica process from its last state, with the same result."""

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import grpc
import pytest

from stagemesh.client import Admitted, Event, Progress, TensorOutput
from stagemesh.rpc.channels import CHANNEL_OPTIONS
from stagemesh.v1 import admin_pb2
from stagemesh.v1.admin_pb2_grpc import AdminServiceStub
from tests.deployment import Deployment, deployed
from tests.diffusion.stages import md5
from tests.system.reading import steps_of

pytestmark = pytest.mark.timeout(240)

STEPS, CHECKPOINT_STEPS = 40, 3
INTERRUPTED_AFTER = 10
"""Number of steps, not a multiple of the checkpoint interval."""
SIDE = 640
"""Side length in pixels. The state takes 1.2 MB, about as much as that of a real image in half precision."""
PIPELINE = f"""\
pipeline: moving
stages:
  painter:
    engine: diffusion
    model: {{model}}
    replicas: 2
    options:
      {{{{dtype: float32, device: cpu, guidance_scale: 3, height: {SIDE}, width: {SIDE}, max_side: {SIDE},
        num_inference_steps: {STEPS}, checkpoint_steps: {CHECKPOINT_STEPS}}}}}
outputs: {{{{numbers: painter.frames}}}}
"""


@pytest.fixture(scope="module")
def up(qwen_image: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Deployment]:
    path = tmp_path_factory.mktemp("moving") / "moving.yaml"
    path.write_text(PIPELINE.format(model=qwen_image))
    with deployed(path) as up:
        yield up


@pytest.fixture(scope="module")
def uninterrupted(up: Deployment) -> str:
    with up.client() as client:
        return _image(iter(client.generate("a red ball", seed=7)))


def _drain(up: Deployment, replica: str) -> None:
    """Makes the requests of a replica resume on another one."""
    with grpc.insecure_channel(up.admin_endpoint, options=CHANNEL_OPTIONS) as channel:
        operator = AdminServiceStub(channel)
        drain = admin_pb2.DrainReplicasRequest(target=replica, wait=True, move_after_s=0.0)
        operator.DrainReplicas(drain, timeout=60)
        operator.ResumeReplicas(admin_pb2.ResumeReplicasRequest(target=replica), timeout=60)


@pytest.mark.parametrize(
    ("interrupt", "resumed_from", "reasons"),
    [
        # The restarted process may answer before the orchestrator finds the port closed.
        (
            Deployment.kill,
            range(INTERRUPTED_AFTER - 1 - CHECKPOINT_STEPS, STEPS, CHECKPOINT_STEPS),
            {"REPLICA_LOST", "REPLICA_RESTARTED"},
        ),
        (_drain, range(INTERRUPTED_AFTER, STEPS), {"DRAINED"}),
    ],
    ids=["killed", "drained"],
)
def test_an_interrupted_image_resumes_elsewhere_with_the_same_result(
    up: Deployment,
    uninterrupted: str,
    interrupt: Callable[[Deployment, str], None],
    resumed_from: range,
    reasons: set[str],
) -> None:
    up.wait(lambda up: up.all_ready())
    with up.client() as client:
        generation = client.generate("a red ball", seed=7)
        made = _image(_with_interruption(iter(generation), lambda replica: interrupt(up, replica)))
    first, second = steps_of(up, generation.request_id)
    assert made == uninterrupted
    assert first.error.reason in reasons
    assert second.replica != first.replica
    assert second.resumed_engine_steps in resumed_from


def _with_interruption(events: Iterator[Event], interrupt: Callable[[str], None]) -> Iterator[Event]:
    """Yields the events, and interrupts the painting replica once."""
    replica = ""
    for event in events:
        if isinstance(event, Admitted):
            replica = event.replicas["painter"]
        if isinstance(event, Progress) and event.engine_steps >= INTERRUPTED_AFTER and replica:
            interrupt(replica)
            replica = ""
        yield event
    assert not replica, "the request finished before the interruption"


def _image(events: Iterator[Event]) -> str:
    return md5([event.tensor for event in events if isinstance(event, TensorOutput)][-1])
