"""Records a request's transformer calls and replays their results, so that several requests share a forward pass.

The blocks of diffusers process one request. To batch several requests, each request's blocks run twice. In the first
run, a stand-in for the transformer records the calls. In the second run, it returns the request's rows of the shared
forward pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Signature
from typing import Any, TypeAlias, cast

import torch

Prediction: TypeAlias = Any
"""The result of a transformer with `return_dict=False`: a tuple that starts with a tensor or a list of tensors."""


@dataclass(frozen=True, eq=False)
class Call:
    """One transformer call for one row."""

    inputs: Mapping[str, Any]
    """The call's arguments, by parameter name of the model's `forward`."""


class TransformerStandIn:
    """Replaces a model in the blocks. Passes calls to `forward` and reads all other attributes from the model."""

    def __init__(self, model: Any, signature: Signature, forward: Callable[[Mapping[str, Any]], Prediction]) -> None:
        """Creates a stand-in. Blocks inspect `signature`, the signature of the model's `forward`, at each step."""
        self._model, self._signature, self._forward = model, signature, forward

    def __call__(self, **inputs: Any) -> Prediction:
        return self._forward(inputs)

    @property
    def forward(self) -> Any:
        """A callable that only provides the signature. Blocks inspect it but do not call it."""
        return _SignatureOnly(self._signature)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _SignatureOnly:
    def __init__(self, signature: Signature) -> None:
        self.__signature__ = signature

    def __call__(self) -> None:
        raise NotImplementedError


class CallRecorder:
    """Records calls and returns zeros for each call."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, inputs: Mapping[str, Any]) -> Prediction:
        self.calls.append(Call(inputs))
        return zero_prediction(inputs)


class CallReplay:
    """Returns the predictions for recorded calls, in the order of the calls."""

    def __init__(self, predictions: Iterator[Prediction]) -> None:
        self._predictions = predictions

    def __call__(self, _inputs: Mapping[str, Any]) -> Prediction:
        return next(self._predictions)


def zero_prediction(inputs: Mapping[str, Any]) -> Prediction:
    """Returns a prediction of zeros with the shapes of the real prediction."""
    latents: torch.Tensor | list[torch.Tensor] = inputs["x"] if "x" in inputs else inputs["hidden_states"]
    if isinstance(latents, list):
        return ([torch.zeros_like(each) for each in latents],)
    return (torch.zeros_like(latents),)


def shape_key(call: Call) -> tuple[object, ...]:
    """Returns a key that is equal for calls that can share a forward pass: the shapes and dtypes of the inputs."""
    return tuple((name, _shape(value)) for name, value in sorted(call.inputs.items()))


def concatenate(calls: Sequence[Call], *, shared: frozenset[str]) -> dict[str, Any]:
    """Returns the inputs of one forward pass with one row per call. Inputs named in `shared` have no row axis."""
    return {
        name: value if name in shared else _concatenate([call.inputs[name] for call in calls])
        for name, value in calls[0].inputs.items()
    }


def split_rows(prediction: Prediction, rows: int) -> list[Prediction]:
    """Returns the predictions of the single rows of a batch."""
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
