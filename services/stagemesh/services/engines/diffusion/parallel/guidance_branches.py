"""CFG parallel: the branches of guidance, each computed by ranks of its own."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import distributed as dist

from stagemesh.common.errors import InternalError, StagemeshError
from stagemesh.services.engines.diffusion.batching.recorded_calls import Answer, Call, blank_answer
from stagemesh.services.engines.diffusion.failures import named

Recorded: TypeAlias = Sequence[Sequence[Call]]
"""The calls of each request's step."""


class Branches:
    """Of each request's calls in a step, a rank computes every so-manieth; then all exchange their answers."""

    def __init__(self, mesh: Any) -> None:
        """A `DeviceMesh` of one dimension: a rank of each branch."""
        self._group = mesh.get_group()
        self._own, self._count = mesh.get_local_rank(), mesh.size()
        self._ranks = dist.get_process_group_ranks(self._group)

    def answers(self, recorded: Recorded, compute: Callable[[Recorded], dict[Call, Answer]]) -> dict[Call, Answer]:
        """The answers to all calls, of which `compute` is given this rank's.

        Where it fails at one rank, all raise that rank's error, and none waits for answers in vain.
        """
        mine, error = dict[Call, Answer](), None
        try:
            mine = compute([self._of(self._own, calls) for calls in recorded])
            _check_shapes(mine)
        except Exception as exc:  # noqa: BLE001  # whatever a model raises
            error = named(exc)
        self._raise_any(error)
        answers: dict[Call, Answer] = {}
        for branch in range(self._count):
            calls = [call for each in recorded for call in self._of(branch, each)]
            answers |= self._exchanged(calls, mine, branch)
        return answers

    # -- inner workings

    def _of(self, branch: int, calls: Sequence[Call]) -> Sequence[Call]:
        return calls[branch :: self._count]

    def _raise_any(self, error: StagemeshError | None) -> None:
        # Of the CPU, so that a GPU's queue of work goes on.
        failed = torch.tensor([int(error is not None)])
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._group)
        if not failed.item():
            return
        errors: list[StagemeshError | None] = [None] * self._count
        dist.all_gather_object(errors, error, group=self._group)
        raise next(each for each in errors if each is not None)

    def _exchanged(self, calls: Sequence[Call], mine: dict[Call, Answer], branch: int) -> dict[Call, Answer]:
        if not calls:
            return {}
        own = branch == self._own
        answers = {call: mine[call] if own else blank_answer(call.inputs) for call in calls}
        tensors = [tensor for answer in answers.values() for tensor in _tensors(answer)]
        joint = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(joint, src=self._ranks[branch], group=self._group)
        if not own:
            at = 0
            for tensor in tensors:
                tensor.copy_(joint[at : at + tensor.numel()].view_as(tensor))
                at += tensor.numel()
        return answers


def _tensors(answer: Answer) -> list[torch.Tensor]:
    sample: torch.Tensor | list[torch.Tensor] = answer[0]
    return [sample] if isinstance(sample, torch.Tensor) else sample


def _check_shapes(answers: dict[Call, Answer]) -> None:
    for call, answer in answers.items():
        expected, made = (
            [(tuple(tensor.shape), tensor.dtype) for tensor in _tensors(each)]
            for each in (blank_answer(call.inputs), answer)
        )
        if made != expected:
            raise InternalError(
                f"the model answers {made} to latents of {expected}; this model cannot be run with the option "
                "parallel.cfg"
            )
