"""A worker that records its runner's pooler outputs."""

from typing import Any

from stagemesh.services.engines.vllm.worker import StageWorker


class WatchingWorker(StageWorker):
    """A worker that tests name as `worker_cls`."""

    pooled: list[Any]

    def init_device(self) -> None:
        super().init_device()
        self.pooled = []

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = super().sample_tokens(*args, **kwargs)
        self.pooled.append(output.pooler_output)
        return output

    def pooler_outputs(self) -> list[Any]:
        """Returns the `pooler_output` of each step."""
        return self.pooled
