"""vLLM's workers as what a profile is recorded of."""

from typing import TYPE_CHECKING

from stagemesh.services.engines.vllm.core_calls import core_call

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class CoreRecorder:
    """See `stagemesh.services.engines.profiles.Recorder`. vLLM is told its folder at its start and once for all."""

    def __init__(self, llm: "AsyncLLM") -> None:
        self._llm = llm

    async def begin(self, prefix: str, *, max_steps: int | None) -> None:
        """See `Recorder`."""
        await core_call(self._llm, self._llm.start_profile(prefix, max_iterations=max_steps))

    async def end(self) -> None:
        """See `Recorder`."""
        await core_call(self._llm, self._llm.stop_profile())
