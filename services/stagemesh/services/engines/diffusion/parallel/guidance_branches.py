"""CFG parallelism: each rank computes one branch of classifier-free guidance."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import distributed as dist

from stagemesh.common.errors import InternalError, StagemeshError
from stagemesh.services.engines.diffusion.batching.recorded_calls import Call, Prediction, zero_prediction
from stagemesh.services.engines.diffusion.model_errors import to_stagemesh_error

RecordedCalls: TypeAlias = Sequence[Sequence[Call]]
"""The transformer calls of one step. Each inner sequence contains the calls of one request."""


class GuidanceBranches:
    """Splits the transformer calls of a step across ranks.

    With n ranks, each rank computes every n-th call of each request. Then all ranks exchange the results.
    """

    def __init__(self, mesh: Any) -> None:
        """Splits calls across the ranks of `mesh`, a one-dimensional `DeviceMesh` with one rank for each guidance
        branch."""
        self._group = mesh.get_group()
        self._own, self._count = mesh.get_local_rank(), mesh.size()
        self._ranks = dist.get_process_group_ranks(self._group)

    def predict(
        self, recorded: RecordedCalls, compute: Callable[[RecordedCalls], dict[Call, Prediction]]
    ) -> dict[Call, Prediction]:
        """Returns the predictions for the calls of all ranks. Calls `compute` with the calls of this rank only.

        If `compute` fails on any rank, all ranks raise the same error, so that no rank waits for results that never
        arrive.
        """
        own_predictions, error = dict[Call, Prediction](), None
        try:
            own_predictions = compute([self._calls_of(self._own, calls) for calls in recorded])
            _check_shapes(own_predictions)
        except Exception as exc:  # noqa: BLE001  # models raise any exception
            error = to_stagemesh_error(exc)
        self._raise_first_error(error)
        predictions: dict[Call, Prediction] = {}
        for branch in range(self._count):
            calls = [call for each in recorded for call in self._calls_of(branch, each)]
            predictions |= self._exchange(calls, own_predictions, branch)
        return predictions

    # -- inner workings

    def _calls_of(self, branch: int, calls: Sequence[Call]) -> Sequence[Call]:
        return calls[branch :: self._count]

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
                "parallel.cfg"
            )
