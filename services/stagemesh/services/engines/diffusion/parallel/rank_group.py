"""The process group of a stage's ranks, which distributes a transformer's computation over the ranks."""

from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import diffusers as _diffusers
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from stagemesh.common.errors import NotReadyError
from stagemesh.services.engines.diffusion.batching.shared_forwards import SharedForwards
from stagemesh.services.engines.diffusion.device import choose_device
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.parallel.guidance_branches import GuidanceBranches

diffusers: Any = _diffusers

_COLLECTIVE_TIMEOUT_S = 300.0
"""Time limit in seconds for a collective operation. Allows for another rank that is still reading its weights."""


class RankGroup:
    """This process's membership in the process group of its stage. All ranks must construct their RankGroup
    concurrently."""

    def __init__(self, options: DiffusionOptions, *, rank: int, store: Path) -> None:
        """Connects to the other ranks through the file `store`. Raises NotReadyError if the machine has too few
        GPUs."""
        self._parallel = parallel = options.parallel
        self.rank = rank
        self.device = choose_device(options, rank=rank)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=parallel.ranks,
            timeout=timedelta(seconds=_COLLECTIVE_TIMEOUT_S),
        )
        self._mesh = self._make_mesh(parallel.cfg, 1, parallel.branch_ranks, names=("cfg", "ring", "ulysses"))

    def distribute(self, forwards: SharedForwards) -> None:
        """Distributes a model's forward passes over the ranks.

        Raises NotReadyError if the model does not support the parallelism that the stage's options select.
        """
        model = forwards.model
        if model is None:
            return
        if self._parallel.cfg > 1:
            forwards.branches = GuidanceBranches(self._mesh["cfg"])
        if self._parallel.ulysses > 1:
            forwards.disable_mixed_lengths()
            self._split_tokens(model)
        if self._parallel.hsdp > 1:
            self._shard_weights(model)

    # -- inner workings

    def _make_mesh(self, *shape: int, names: tuple[str, ...]) -> Any:
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    def _split_tokens(self, model: Any) -> None:
        degree = self._parallel.ulysses
        config = diffusers.ContextParallelConfig(ulysses_degree=degree, mesh=self._mesh, ulysses_anything=True)
        accelerator = cast("Any", torch.accelerator)
        count = accelerator.device_count
        if self.device.type == "cpu":
            # diffusers computes the rank modulo the number of accelerators even if, as here, it uses the CPU.
            accelerator.device_count = lambda: 1
        try:
            model.enable_parallelism(config=config)
        except (ValueError, RuntimeError) as exc:
            raise NotReadyError(
                f"{type(model).__name__} cannot be shared by {degree} ranks: {exc}; set parallel.ulysses to 1",
                reason="UNSUPPORTED_MODEL",
            ) from exc
        finally:
            accelerator.device_count = count

    def _shard_weights(self, model: torch.nn.Module) -> None:
        """Shards the transformer's weights across ranks.

        Each block is sharded separately, so that a rank assembles the complete weights of only one block at a time.
        """
        degree = self._parallel.hsdp
        mesh = self._make_mesh(self._parallel.ranks // degree, degree, names=("same", "shard"))["shard"]
        for child in model.children():
            if isinstance(child, torch.nn.ModuleList):
                for block in child:
                    fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
