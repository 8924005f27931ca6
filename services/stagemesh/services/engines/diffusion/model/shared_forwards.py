"""Records the model calls of several requests, and computes them in shared forward passes.

diffusers' pipeline blocks process one request at a time. To batch several requests, the blocks of each request run
twice. In the first run, stand-ins for the denoising models, such as the transformer, record the calls. Shared forward
passes then compute the recorded calls of all requests. In the second run, the stand-ins return the request's
predictions from the shared forward passes.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch

from stagemesh.services.engines.diffusion.caches import Caches
from stagemesh.services.engines.diffusion.model.families import Hints
from stagemesh.services.engines.diffusion.model.mixed_lengths import MixedLengthForward
from stagemesh.services.engines.diffusion.serialization import tensors_of
from stagemesh.services.engines.diffusion.state import DiffusionRequestState

Prediction: TypeAlias = Any
"""The output of a transformer with `return_dict=False`: a tuple whose first item is a tensor or a list of tensors."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a denoising model, with a batch size of 1."""

    model: Any
    inputs: Mapping[str, Any]
    """Arguments of the call, by parameter name of the model's `forward`."""


Predict: TypeAlias = Callable[[Any, Mapping[str, Any]], Prediction]
"""A function that returns a model's prediction. Its arguments are the model and the inputs of the call."""
RecordedCalls: TypeAlias = Sequence[Sequence[Call]]
"""The model calls of one step. Each inner sequence contains the calls of one request."""
Compute: TypeAlias = Callable[[RecordedCalls], dict[Call, Prediction]]
"""A function that computes the recorded calls of all requests and returns the prediction for each call."""
SplitCalls: TypeAlias = Callable[[RecordedCalls, Compute], dict[Call, Prediction]]
"""A function that distributes the recorded calls across processes and returns the prediction for each call. In this
process, it computes a part of the calls with the `Compute` function. Other processes compute the other calls."""


class ModelStandIn:
    """Replaces a model in a pipeline's blocks. Passes each call's inputs to the function `predict`, and reads all other
    attributes from the real model.
    """

    def __init__(self, model: Any, forward: "ForwardSignature", predict: Predict) -> None:
        self._model, self.forward, self._predict = model, forward, predict

    def __call__(self, *args: Any, **inputs: Any) -> Prediction:
        return self._predict(self._model, dict(zip(self.forward.__signature__.parameters, args, strict=False)) | inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class ForwardSignature:
    """A callable with the signature of a model's `forward`. Pipeline blocks inspect the signature at each step but
    never call the object.
    """

    def __init__(self, model: Any) -> None:
        kind = cast("Any", type(model))
        # The class's method, because hooks replace the object's `forward` with a function that accepts anything. Its
        # signature is computed only once, because each computation leaks memory in Python 3.11.
        self.__signature__ = inspect.signature(kind.forward.__get__(model))

    def __call__(self) -> None:
        raise NotImplementedError


class CallRecorder:
    """A `Predict` function. Records each call in `calls`, and returns a prediction of zeros."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, model: Any, inputs: Mapping[str, Any]) -> Prediction:
        self.calls.append(Call(model, inputs))
        return zero_prediction(inputs)


def replay(predictions: Iterable[Prediction]) -> Predict:
    """Returns a `Predict` function that returns the given predictions in order, one at each call, and ignores the
    call's inputs.
    """
    remaining = iter(predictions)
    return lambda _model, _inputs: next(remaining)


def zero_prediction(inputs: Mapping[str, Any]) -> Prediction:
    """Returns zeros with the shape and data type of the prediction that the transformer would return for these
    inputs.
    """
    latents: torch.Tensor | list[torch.Tensor] = inputs["x"] if "x" in inputs else inputs["hidden_states"]
    if isinstance(latents, list):
        return ([torch.zeros_like(each) for each in latents],)
    return (torch.zeros_like(latents),)


class SharedForwards:
    """Computes the model calls of requests, either separately or in shared forward passes."""

    def __init__(self, hints: Hints, models: Mapping[str, Any]) -> None:
        """`models` contains the models that the denoising loop calls, by component name. Empty if the stage does not
        denoise.
        """
        self.caches: Caches | None = None
        """The step cache of the transformer, or None if the stage does not use one. With a step cache, requests do not
        share forward passes."""
        self.split_calls: SplitCalls | None = None
        """A function that distributes transformer calls across processes. None if this process computes all calls."""
        self.hints, self.models = hints, models
        self.model = next(iter(models.values()), None)
        """The first of the models, or None if the stage does not denoise."""
        self._signatures = {name: ForwardSignature(model) for name, model in models.items()}
        has_mixed_lengths = hints.mixed_lengths and self.model is not None and not self.model.zero_cond_t
        self._mixed_lengths = MixedLengthForward(self.model) if has_mixed_lengths else None

    @property
    def stands_in(self) -> bool:
        """Whether the blocks of a step can run with stand-ins for the models."""
        return self.hints.batches or self.caches is not None

    def stand_ins(self, predict: Predict) -> dict[str, ModelStandIn]:
        """Returns stand-ins for the models that pass their calls to `predict`, by component name."""
        return {name: ModelStandIn(self.models[name], each, predict) for name, each in self._signatures.items()}

    def forward_alone(self, state: DiffusionRequestState) -> Predict:
        """Returns a `Predict` function that computes each model call of one request in a separate forward pass."""
        branch = 0

        def forward(model: Any, inputs: Mapping[str, Any]) -> Prediction:
            nonlocal branch
            if self.caches is None:
                return model(**inputs)
            with self.caches.context(f"{state.request_id}/{branch}", total_steps=state.total_steps):
                branch += 1
                return model(**inputs)

        return forward

    def forward_together(
        self, states: Sequence[DiffusionRequestState], recorded: RecordedCalls
    ) -> dict[Call, Prediction]:
        """Computes the recorded calls of all requests in shared forward passes. Returns the prediction for each call.

        `states` contains the request of each item of `recorded`.
        """
        if self.split_calls is None:
            return self._predict(states, recorded)
        return self.split_calls(recorded, lambda own: self._predict(states, own))

    def disable_mixed_lengths(self) -> None:
        """Prevents calls with different numbers of tokens from sharing a forward pass."""
        self._mixed_lengths = None

    def batch_key(self, state: DiffusionRequestState) -> tuple[object, ...]:
        """Returns a key for grouping requests. The calls of requests with equal keys can share a forward pass."""
        if self.caches is not None or not self.hints.batches:
            return (state.request_id,)
        if self._mixed_lengths is not None:
            return ()
        fields = state.values.get_by_kwargs("denoiser_input_fields")
        size = (state.inputs.height, state.inputs.width, state.inputs.num_frames)
        return (size, tuple(tuple(tensor.shape) for tensor in tensors_of(fields)))

    # -- inner workings

    def _predict(self, states: Sequence[DiffusionRequestState], recorded: RecordedCalls) -> dict[Call, Prediction]:
        groups: dict[object, list[Call]] = defaultdict(list)
        for state, calls in zip(states, recorded, strict=True):
            key = self.batch_key(state)
            for call in calls[::-1] if self.hints.joint_guidance == "negative first" else calls:
                groups[key, id(call.model), self._group_key(call)].append(call)
        predictions: dict[Call, Prediction] = {}
        for group in groups.values():
            predictions |= zip(group, self._forward(group), strict=True)
        return predictions

    def _group_key(self, call: Call) -> object:
        if self._mixed_lengths is not None:
            return None if self._mixed_lengths.can_join(call.inputs) else call
        # A pipeline that denoises both guidance branches in one forward pass accepts their inputs without grouping.
        return None if self.hints.joint_guidance is not None else _shape_key(call)

    def _forward(self, group: Sequence[Call]) -> list[Prediction]:
        if len(group) == 1:
            return [group[0].model(**group[0].inputs)]
        if self._mixed_lengths is not None:
            return self._mixed_lengths.forward([call.inputs for call in group])
        return _split_rows(group[0].model(**_concatenate(group, shared=self.hints.shared_inputs)), len(group))


def _shape_key(call: Call) -> tuple[object, ...]:
    """Returns a key that consists of the shapes and data types of a call's tensors and of the values of its other
    inputs.

    Calls with equal keys can share a forward pass.
    """
    return tuple((name, _shape_of(value)) for name, value in sorted(call.inputs.items()))


def _concatenate(calls: Sequence[Call], *, shared: frozenset[str]) -> dict[str, Any]:
    """Returns the inputs of one forward pass that has one row for each call.

    `shared` contains the names of the inputs that have no row axis. These inputs are taken from the first call.
    """
    return {
        name: value if name in shared else _concatenate_values([call.inputs[name] for call in calls])
        for name, value in calls[0].inputs.items()
    }


def _split_rows(prediction: Prediction, rows: int) -> list[Prediction]:
    """Splits the prediction for a batch into a list with one prediction for each row. `rows` is the number of rows."""
    sample = prediction[0]
    return [(sample[row : row + 1],) for row in range(rows)]


def _shape_of(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, list | tuple):
        return tuple(_shape_of(each) for each in cast("Sequence[Any]", value))
    return repr(value)


def _concatenate_values(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(values))
    if isinstance(first, list):
        return [each for value in values for each in value]
    return first
