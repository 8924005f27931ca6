"""The process group of a stage's ranks, which distributes a transformer's computation over several worker processes."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import diffusers as _diffusers
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from stagemesh.common.errors import InternalError, NotReadyError, StagemeshError
from stagemesh.services.engines.diffusion.model.shared_forwards import (
    Call,
    Compute,
    Prediction,
    RecordedCalls,
    SharedForwards,
    zero_prediction,
)
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.state import to_stagemesh_error
from stagemesh.services.engines.torch_setup import UnusableOptionError, choose_device

diffusers: Any = _diffusers

_COLLECTIVE_TIMEOUT_S = 300.0
"""Time limit in seconds for a collective operation. The limit is long, because another rank may still be loading its
weights."""


class RankGroup:
    """The process group of a stage's ranks, as seen by this rank. All ranks must construct their `RankGroup` at the
    same time.
    """

    def __init__(self, options: DiffusionOptions, *, rank: int, store: Path) -> None:
        """Connects to the other ranks through the file `store`. `rank` is the number of this rank, from 0.

        Raises NotReadyError if the machine has too few GPUs.
        """
        self._parallel = parallel = options.parallel
        self.rank = rank
        self.device = choose_device(options.device, ranks=parallel.ranks, rank=rank)
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
        shape = (parallel.cfg, 1, parallel.branch_ranks)
        self._mesh: Any = init_device_mesh(self.device.type, shape, mesh_dim_names=("cfg", "ring", "ulysses"))

    def distribute(self, forwards: SharedForwards) -> None:
        """Distributes the forward passes of a transformer over the ranks. Does nothing if the stage has no transformer.

        Raises NotReadyError if the model does not support the kind of parallelism that the stage's options select.
        """
        if self._parallel.cfg > 1 and forwards.models:
            if not forwards.hints.batches:
                raise UnusableOptionError(
                    "this model's guidance branches cannot be computed apart from each other; set parallel.cfg to 1"
                )
            forwards.split_calls = GuidanceBranches(self._mesh["cfg"]).predict
        for model in forwards.models.values():
            if self._parallel.ulysses > 1:
                forwards.disable_mixed_lengths()
                self._split_tokens(model)
            if self._parallel.hsdp > 1:
                self._shard_weights(model)

    # -- inner workings

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
        """Shards the weights of `model` across ranks.

        Each block is sharded separately, so that a rank assembles the complete weights of only one block at a time.
        """
        degree = self._parallel.hsdp
        shape = (self._parallel.ranks // degree, degree)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("same", "shard"))["shard"]
        for child in model.children():
            if isinstance(child, torch.nn.ModuleList):
                for block in child:
                    fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)


class GuidanceBranches:
    """Computes each branch of classifier-free guidance on a different rank (CFG parallelism).

    With n ranks, each rank computes every n-th call of each request. Then all ranks exchange the results.
    """

    def __init__(self, mesh: Any) -> None:
        """`mesh` is a one-dimensional `DeviceMesh` with one rank for each guidance branch."""
        self._group = mesh.get_group()
        self._own, self._count = mesh.get_local_rank(), mesh.size()
        self._ranks = dist.get_process_group_ranks(self._group)

    def predict(self, recorded: RecordedCalls, compute: Compute) -> dict[Call, Prediction]:
        """Returns the predictions for all calls in `recorded`. Uses `compute` only for the calls of this rank, and
        receives the other predictions from the other ranks.

        If `compute` fails on any rank, all ranks raise the same error, so that no rank waits for results that never
        arrive.
        """
        own_predictions, error = dict[Call, Prediction](), None
        try:
            own_predictions = compute([calls[self._own :: self._count] for calls in recorded])
            _check_shapes(own_predictions)
        except Exception as exc:  # noqa: BLE001  # models raise any exception
            error = to_stagemesh_error(exc)
        self._raise_first_error(error)
        predictions: dict[Call, Prediction] = {}
        for branch in range(self._count):
            calls = [call for each in recorded for call in each[branch :: self._count]]
            predictions |= self._exchange(calls, own_predictions, branch)
        return predictions

    # -- inner workings

    def _raise_first_error(self, error: StagemeshError | None) -> None:
        # The tensor is on the CPU, so that a GPU does not have to finish its queued work first.
        failed = torch.tensor([int(error is not None)])
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._group)
        if not failed.item():
            return
        errors: list[StagemeshError | None] = [None] * self._count
        dist.all_gather_object(errors, error, group=self._group)
        raise next(each for each in errors if each is not None)

    def _exchange(
        self, calls: Sequence[Call], own_predictions: dict[Call, Prediction], branch: int
    ) -> dict[Call, Prediction]:
        if not calls:
            return {}
        is_own = branch == self._own
        predictions = {call: own_predictions[call] if is_own else zero_prediction(call.inputs) for call in calls}
        tensors = [tensor for prediction in predictions.values() for tensor in _tensors(prediction)]
        joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(joined, src=self._ranks[branch], group=self._group)
        if not is_own:
            parts = torch.split(joined, [each.numel() for each in tensors])
            for tensor, values in zip(tensors, parts, strict=True):
                tensor.copy_(values.view_as(tensor))
        return predictions


def _tensors(prediction: Prediction) -> list[torch.Tensor]:
    sample: torch.Tensor | list[torch.Tensor] = prediction[0]
    return [sample] if isinstance(sample, torch.Tensor) else sample


def _check_shapes(predictions: dict[Call, Prediction]) -> None:
    for call, prediction in predictions.items():
        expected, actual = (
            [(tuple(tensor.shape), tensor.dtype) for tensor in _tensors(each)]
            for each in (zero_prediction(call.inputs), prediction)
        )
        if actual != expected:
            raise InternalError(
                f"the model predicts {actual} from latents of {expected}; this model cannot run with the option "
                "parallel.cfg",
                reason="ENGINE_ERROR",
            )
