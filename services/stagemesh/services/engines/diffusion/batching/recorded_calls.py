"""Records a request's transformer calls and replays their predictions, so that requests can share a forward pass.

diffusers' pipeline blocks process one request at a time. To batch several requests, the blocks of each request run
twice. In the first run, a stand-in for the transformer records the calls. A shared forward pass then computes the
recorded calls of all requests. In the second run, the stand-in returns the request's predictions from the shared
forward pass.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch

Prediction: TypeAlias = Any
"""The output of a transformer with `return_dict=False`: a tuple whose first item is a tensor or a list of tensors."""


@dataclass(frozen=True, eq=False)
class Call:
    """One transformer call with a batch size of 1."""

    inputs: Mapping[str, Any]
    """Arguments of the call, by parameter name of the model's `forward`."""


class TransformerStandIn:
    """Replaces the transformer in a pipeline's blocks. Passes calls to the function `predict`, and reads all other
    attributes from the real model."""

    def __init__(self, model: Any, predict: Callable[[Mapping[str, Any]], Prediction]) -> None:
        self._model, self._predict = model, predict
        kind: Any = type(model)
        # The class's method, because hooks replace the object's `forward` with a function that accepts anything.
        self.forward = kind.forward.__get__(model)
        """The model's own `forward`. Pipeline blocks inspect its signature but never call it."""

    def __call__(self, **inputs: Any) -> Prediction:
        return self._predict(inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class CallRecorder:
    """Records each call in `calls` and returns a prediction of zeros."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, inputs: Mapping[str, Any]) -> Prediction:
        self.calls.append(Call(inputs))
        return zero_prediction(inputs)


def replay(predictions: Iterable[Prediction]) -> Callable[[Mapping[str, Any]], Prediction]:
    """Returns a function that ignores its argument and returns the next of the given predictions at each call."""
    remaining = iter(predictions)
    return lambda _inputs: next(remaining)


def zero_prediction(inputs: Mapping[str, Any]) -> Prediction:
    """Returns a prediction of zeros with the shape and data type of the model's prediction for these inputs."""
    latents: torch.Tensor | list[torch.Tensor] = inputs["x"] if "x" in inputs else inputs["hidden_states"]
    if isinstance(latents, list):
        return ([torch.zeros_like(each) for each in latents],)
    return (torch.zeros_like(latents),)


def shape_key(call: Call) -> tuple[object, ...]:
    """Returns the shapes and data types of a call's tensors, and the values of its other inputs.

    Calls with equal keys can share a forward pass.
    """
    return tuple((name, _shape(value)) for name, value in sorted(call.inputs.items()))


def concatenate(calls: Sequence[Call], *, shared: frozenset[str]) -> dict[str, Any]:
    """Returns the inputs of a forward pass that has one row for each call.

    Inputs named in `shared` have no row axis and are copied from the first call.
    """
    return {
        name: value if name in shared else _concatenate([call.inputs[name] for call in calls])
        for name, value in calls[0].inputs.items()
    }


def split_rows(prediction: Prediction, rows: int) -> list[Prediction]:
    """Splits a batch's prediction into one prediction for each row. `rows` is the number of rows."""
    sample = prediction[0]
    return [(sample[row : row + 1],) for row in range(rows)]


def _shape(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, list | tuple):
        return tuple(_shape(each) for each in cast("Sequence[Any]", value))
    return repr(value)


def _concatenate(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(values))
    if isinstance(first, list):
        return [each for value in values for each in value]
    return first
