"""How a transformer's calls are put together: what the blocks of several requests ask of it, in few forwards.

Blocks are written for one request. To have several share a forward, each request's blocks run twice: first against a
stand-in that notes what they ask for, then against one that answers with their rows of the joint forward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Signature
from typing import Any, TypeAlias, cast

import torch

Answer: TypeAlias = Any
"""What a transformer returns with `return_dict=False`: a tuple of the sample, a tensor or a list of tensors."""


@dataclass(frozen=True, eq=False)
class Call:
    """One forward of a transformer for one row."""

    inputs: Mapping[str, Any]
    """By the names of its `forward`'s parameters."""
    context: str = ""
    """Whose it is, for what a model keeps from step to step."""


class Transformer:
    """Stands in for a model where blocks see it: its calls go to `forward`, all else is the model's own."""

    def __init__(self, model: Any, signature: Signature, forward: Callable[[Mapping[str, Any]], Answer]) -> None:
        """`signature` is that of the model's `forward`, which blocks ask for at every step."""
        self._model, self._signature, self._forward = model, signature, forward

    def __call__(self, **inputs: Any) -> Answer:
        return self._forward(inputs)

    @property
    def forward(self) -> Any:
        """What blocks look at, and do not call."""
        return _Described(self._signature)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Described:
    """A callable whose signature need not be worked out."""

    def __init__(self, signature: Signature) -> None:
        self.__signature__ = signature

    def __call__(self) -> None:
        raise NotImplementedError


class CallRecorder:
    """Notes calls, and answers with no noise at all."""

    def __init__(self, context: str) -> None:
        self.calls: list[Call] = []
        self._context = context

    def __call__(self, inputs: Mapping[str, Any]) -> Answer:
        self.calls.append(Call(inputs, f"{self._context}/{len(self.calls)}"))
        return blank_answer(inputs)


class CallReplayer:
    """Answers calls in the order in which they were noted."""

    def __init__(self, answers: Iterator[Answer]) -> None:
        self._answers = answers

    def __call__(self, _inputs: Mapping[str, Any]) -> Answer:
        return next(self._answers)


def blank_answer(inputs: Mapping[str, Any]) -> Answer:
    """No noise at all, in the shape of a call's answer."""
    return (_nothing(inputs["x"] if "x" in inputs else inputs["hidden_states"]),)


def shape_of(call: Call) -> tuple[object, ...]:
    """Calls of the same shape can share a forward."""
    return tuple((name, _shape(value)) for name, value in sorted(call.inputs.items()))


def joined(calls: Sequence[Call], *, shared: frozenset[str]) -> dict[str, Any]:
    """The inputs of one forward with a row for each call; those in `shared` have no rows."""
    first = calls[0].inputs
    return {
        name: value if name in shared else _joined([call.inputs[name] for call in calls])
        for name, value in first.items()
    }


def split(answer: Answer, rows: int) -> list[Answer]:
    """Each row's answer."""
    sample = answer[0]
    return [(sample[row : row + 1],) for row in range(rows)]


def _nothing(latents: torch.Tensor | list[torch.Tensor]) -> Any:
    if isinstance(latents, list):
        return [torch.zeros_like(each) for each in latents]
    return torch.zeros_like(latents)


def _shape(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, list | tuple):
        return tuple(_shape(each) for each in cast("Sequence[Any]", value))
    return repr(value)


def _joined(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(values))
    if isinstance(first, list):
        return [each for value in values for each in value]
    return first
