"""vLLM's own use of `pooler_output` in a worker that can write hidden states."""

from pathlib import Path

import pytest
import torch
from pydantic import JsonValue

from stagemesh.connectors.data_plane import DataPlane
from stagemesh.services.engines.vllm.arguments import engine_arguments
from stagemesh.services.engines.vllm.engine_core import shut_down
from stagemesh.services.engines.vllm.options import HiddenStatesOptions
from stagemesh.services.engines.vllm.rows.hidden_states import HiddenStates
from tests.engines.vllm.emitted_states import PROMPTS, load_reference
from tests.engines.vllm.tiny_model import write_real_model


@pytest.mark.timeout(240)
async def test_pooling_model_gives_the_reference_embedding(tmp_path: Path) -> None:
    from vllm import PoolingParams, TokensPrompt
    from vllm.v1.engine.async_llm import AsyncLLM

    model = write_real_model(tmp_path / "model")
    options: dict[str, JsonValue] = {"runner": "pooling", "dtype": "float32", "kv_cache_memory_bytes": 8 << 20}
    plane = DataPlane(replica="a-0", pipeline="p", generation="1")
    states = HiddenStates(HiddenStatesOptions(), plane.arena, share_bytes=1 << 20, stage="a")
    llm = AsyncLLM.from_engine_args(engine_arguments(options, model=str(model), stage="a", features=[states]))
    try:
        await states.start(llm)
        for number, prompt in enumerate(PROMPTS[:3]):
            pooling = llm.encode(TokensPrompt(prompt_token_ids=prompt), PoolingParams(task="embed"), f"r{number}")
            (output,) = [output async for output in pooling]
            assert (output.outputs.data - _expected(model, prompt)).abs().max() < 1e-5
    finally:
        shut_down(llm)
        states.close()
        await plane.close()


def _expected(model: Path, prompt: list[int]) -> torch.Tensor:
    """Returns the last token's state after the final norm, normalized to length 1."""
    with torch.inference_mode():
        states = load_reference(model)(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    return torch.nn.functional.normalize(states[-1][0, -1], dim=-1)
