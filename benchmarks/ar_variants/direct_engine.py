"""The baseline: AsyncLLM in a process of its own, called directly."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.ar_variants.model_files import options_of
from benchmarks.ar_variants.workload import SEED, Outcome, Trial, run_streams
from benchmarks.edge_ways.worker import End
from stagemesh.services.engines.vllm.engine_core import prepare_environment

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

MODEL = "STAGEMESH_BENCHMARK_MODEL"


class DirectEngine(End):
    """Runs the model that the environment variable `MODEL` names."""

    _llm: "AsyncLLM"

    async def open(self) -> None:
        """Loads the model. Returns when the engine answers."""
        prepare_environment()
        from vllm.v1.engine.async_llm import AsyncLLM

        from stagemesh.services.engines.vllm.arguments import engine_arguments

        model = Path(os.environ[MODEL])
        options = {**options_of(model), "worker_cls": "auto"}
        self._llm = AsyncLLM.from_engine_args(engine_arguments(options, model=str(model), stage="direct"))
        await self._llm.get_supported_tasks()

    async def close(self) -> None:
        """Ends the engine's processes."""
        self._llm.shutdown()

    async def process_id(self) -> int:
        """Returns the id of this process, whose children are the engine's processes."""
        return os.getpid()

    async def run(self, trial: Trial) -> Outcome:
        """Runs one trial."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        async def ask(request_id: str, prompt: list[int], wanted: int) -> int:
            params = SamplingParams(temperature=0.0, max_tokens=wanted, seed=SEED, output_kind=RequestOutputKind.DELTA)
            (rendered,) = self._llm.renderer.render_cmpl([{"prompt_token_ids": prompt}])
            messages = tokens = 0
            async for output in self._llm.generate(rendered, params, request_id):
                tokens += len(output.outputs[0].token_ids)
                messages += bool(output.outputs[0].text)
            assert tokens == wanted, f"{tokens} tokens arrived of {wanted}"
            return messages

        return await run_streams(ask, trial)
