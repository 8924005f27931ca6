"""The messages to a stage."""

from pathlib import Path

import pytest

from stagemesh.common.notification import Notifier
from stagemesh.orchestrator.request.failures import Failures
from stagemesh.orchestrator.request.output_record import RequestRecord
from stagemesh.orchestrator.request.step_calls import StepCalls
from stagemesh.orchestrator.request.validation import validate
from stagemesh.pipeline import load_pipeline
from stagemesh.pipeline.graph import Route
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.v1 import orchestrator_pb2, request_pb2, stage_pb2, tensor_pb2
from tests.orchestrator.mesh import CHAIN


@pytest.mark.parametrize(
    ("prompt_bytes", "state_bytes", "fits"),
    [
        (10, 6 << 20, True),
        (1 << 20, 6 << 20, True),
        (2 << 20, 6 << 20, False),
        (MAX_MESSAGE_BYTES - (1 << 20), 10, True),
        (MAX_MESSAGE_BYTES - (1 << 20), 1 << 20, False),
    ],
)
def test_a_checkpoint_is_useful_if_it_fits_into_a_message_with_the_input(
    tmp_path: Path, prompt_bytes: int, state_bytes: int, *, fits: bool
) -> None:
    state = tensor_pb2.Tensor(name="state", inline=bytes(state_bytes))
    checkpoint = stage_pb2.Checkpoint(steps=3, tensors=[state])
    assert _calls(tmp_path, prompt_bytes).can_resume_from(checkpoint) is fits


def test_a_checkpoint_without_a_state_is_useless(tmp_path: Path) -> None:
    calls = _calls(tmp_path, prompt_bytes=10)
    assert not calls.can_resume_from(stage_pb2.Checkpoint(steps=3, rows={"text": 3}))
    assert calls.can_resume_from(stage_pb2.Checkpoint(steps=3, token_ids=[5, 6, 7]))


def _calls(folder: Path, prompt_bytes: int) -> StepCalls:
    (folder / "chain.yaml").write_text(CHAIN)
    given = orchestrator_pb2.GenerateRequest(input=request_pb2.Input(text="x" * prompt_bytes))
    request, changed = validate(given, load_pipeline(str(folder / "chain.yaml"))), Notifier()
    return StepCalls(
        request, Route((), (), {}), {}, record=RequestRecord(), failures=Failures(changed), changed=changed
    )
