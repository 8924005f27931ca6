"""vLLM's workers, which choose our runners; named in the engine arguments as `worker_cls`."""

import atexit
import gc
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2

from stagemesh.services.engines.vllm.embeddings.memory import EmbeddingMemory, decode_ticket
from stagemesh.services.engines.vllm.embeddings.runner import EmbeddedV1, EmbeddedV2
from stagemesh.services.engines.vllm.hidden_states.row_messages import decode_attachment
from stagemesh.services.engines.vllm.hidden_states.row_writer import RowWriter
from stagemesh.services.engines.vllm.hidden_states.runner import RunnerV1, RunnerV2
from stagemesh.services.engines.vllm.resume.runner import ResumesV1, ResumesV2
from stagemesh.services.engines.vllm.seeding import DrawsOnlyWhatCounts

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker
elif current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class StageWorker(Worker):
    """The platform's own worker with a runner that emits hidden states."""

    def init_device(self) -> None:
        """Mixes our part into whatever runner vLLM has made."""
        super().init_device()
        runner = cast("Any", self.model_runner)
        second = isinstance(runner, GPUModelRunnerV2)
        parts = (RunnerV2, ResumesV2, EmbeddedV2) if second else (RunnerV1, ResumesV1, EmbeddedV1)
        seeding = (DrawsOnlyWhatCounts,) if current_platform.is_cpu() else ()
        kind: type[Any] = runner.__class__
        _mix(runner, type(f"Stage{kind.__name__}", (*parts, *seeding, kind), {}))

    def shutdown(self) -> None:
        """The process ends after this, and its interpreter need not look through all that is loaded: seconds."""
        super().shutdown()
        atexit.register(gc.freeze)

    def attach_replica(self, attachments: list[bytes]) -> bool:
        """Called through `collective_rpc` with an attachment for each rank; whether this one is to write rows."""
        if not self.writes_rows():
            return False
        assert self.device is not None, "a worker is attached once it has its device"
        runner: Any = self.model_runner
        runner.attach(RowWriter(decode_attachment(attachments[0]), device=self.device))
        return True

    def attach_embeddings(self, ticket: bytes) -> None:
        """Called through `collective_rpc`: requests may have their embeddings in this memory."""
        runner: Any = self.model_runner
        runner.attach_embeddings(EmbeddingMemory(decode_ticket(ticket)))

    def model_without_layers(self) -> str | None:
        """See `EmitsHiddenStates.without_layers`."""
        runner: Any = self.model_runner
        return cast("str | None", runner.without_layers)

    def writes_rows(self) -> bool:
        """Whether all rows of the last layer are here, and no other rank is to write them."""
        return bool(get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0)


def _mix(runner: Any, kind: type[Any]) -> None:
    runner.__class__ = kind
