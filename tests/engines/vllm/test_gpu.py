"""Hidden states on a GPU with both of vLLM's model runners, compared with the CPU; copies run on their own stream."""

import gzip
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from tests.engines.support import controls_of
from tests.engines.vllm.emitted_states import (
    PROMPTS,
    Running,
    assert_same,
    load_reference,
    received,
    received_all,
    reference,
    running,
    task,
)
from tests.module_fixtures import made_for_module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

TOLERANCE = 1e-3
"""The tolerance for a GPU, which sums in another order."""
HIDDEN_SIZE = 64


profile_dir = made_for_module(Path)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["V1", "V2", "V2-graphs"])
async def host(request: pytest.FixtureRequest, deep_model: Path, profile_dir: Path) -> AsyncIterator[Running]:
    """An engine with each of the runners, and the second runner also with CUDA graphs."""
    eager = request.param != "V2-graphs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0" if request.param == "V1" else "1")
        # By default, Triton rounds the inputs of float32 products, such as the products of attention, to 10 bits.
        patch.setenv("TRITON_F32_DEFAULT", "ieee")
        async with running(
            deep_model, profile_dir=str(profile_dir), enforce_eager=eager, gpu_memory_utilization=0.2
        ) as host:
            yield host


async def test_states_equal_those_of_the_cpu(host: Running, deep_model: Path) -> None:
    loaded = load_reference(deep_model)
    for one, prompt in zip(await received_all(host.engine), PROMPTS, strict=True):
        assert_same(one, reference(loaded, prompt), tolerance=TOLERANCE)


async def test_rows_are_copied_on_a_stream_of_their_own(host: Running) -> None:
    await controls_of(host.engine).profiles.start(f"rows-{id(host)}", max_steps=None)
    await received(host.engine, task(5))
    traced = _events(await controls_of(host.engine).profiles.stop())
    computing = {event["args"]["stream"] for event in traced if event.get("cat") == "kernel"}
    row_bytes = len(PROMPTS[5]) * HIDDEN_SIZE * 4
    # The compute stream first gathers the rows, which are copies within the device.
    copies = [
        event
        for event in traced
        if event.get("cat") == "gpu_memcpy" and "DtoH" in event["name"] and event["args"]["bytes"] == row_bytes
    ]
    assert len(copies) == 3, "one copy for each layer"
    for copy in copies:
        assert "Pinned" in copy["name"]
        assert copy["args"]["stream"] not in computing


def _events(files: Sequence[str]) -> list[dict[str, Any]]:
    traces = [json.loads(gzip.decompress(Path(file).read_bytes())) for file in files if file.endswith(".gz")]
    return [event for trace in traces for event in trace["traceEvents"]]
