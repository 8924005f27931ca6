"""The processes that compute together, and how a transformer is spread over them."""

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
from stagemesh.services.engines.diffusion.devices import device_of
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.parallel.guidance_branches import Branches

diffusers: Any = _diffusers

_MEETING_S = 300.0
"""As long a rank waits for another: the slowest may still read its weights."""


class Ranks:
    """This process among those of its stage. Made once a process, by all of them together."""

    def __init__(self, options: DiffusionOptions, *, rank: int, store: Path) -> None:
        """`store` is a file by which they find each other. Raises NotReadyError where there are too few devices."""
        self._parallel = parallel = options.parallel
        self.rank = rank
        self.device = device_of(options, rank=rank)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=parallel.ranks,
            timeout=timedelta(seconds=_MEETING_S),
        )
        self._mesh = self._make_mesh(parallel.cfg, 1, parallel.branch_ranks, names=("cfg", "ring", "ulysses"))

    def spread(self, forwarding: SharedForwards) -> None:
        """Has the ranks share a model's forwards. Raises NotReadyError for a model that cannot be shared so."""
        model = forwarding.model
        if model is None:
            return
        if self._parallel.cfg > 1:
            forwarding.branches = Branches(self._mesh["cfg"])
        if self._parallel.ulysses > 1:
            forwarding.stop_mixing()
            self._share_tokens(model)
        if self._parallel.hsdp > 1:
            self._share_weights(model)

    # -- inner workings

    def _make_mesh(self, *shape: int, names: tuple[str, ...]) -> Any:
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    def _share_tokens(self, model: Any) -> None:
        degree = self._parallel.ulysses
        config = diffusers.ContextParallelConfig(ulysses_degree=degree, mesh=self._mesh, ulysses_anything=True)
        accelerator = cast("Any", torch.accelerator)
        count = accelerator.device_count
        if self.device.type == "cpu":
            # diffusers takes the rank modulo the number of accelerators, for a device that it then does not use.
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

    def _share_weights(self, model: torch.nn.Module) -> None:
        """Each block by itself, so that one is whole at a time, and what is in none of them together."""
        degree = self._parallel.hsdp
        mesh = self._make_mesh(self._parallel.ranks // degree, degree, names=("same", "shard"))["shard"]
        for part in model.children():
            if isinstance(part, torch.nn.ModuleList):
                for block in part:
                    fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
