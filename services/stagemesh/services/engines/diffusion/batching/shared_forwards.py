"""Groups the transformer calls of several requests and computes each group in one forward pass."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stagemesh.services.engines.diffusion.batching.mixed_lengths import MixedLengthForward
from stagemesh.services.engines.diffusion.batching.recorded_calls import (
    Call,
    Prediction,
    concatenate,
    shape_key,
    split_rows,
)
from stagemesh.services.engines.diffusion.caches.step_caches import Caches
from stagemesh.services.engines.diffusion.model.families import Family
from stagemesh.services.engines.diffusion.parallel.guidance_branches import GuidanceBranches
from stagemesh.services.engines.diffusion.state import DiffusionRequestState
from stagemesh.services.engines.diffusion.transfer.serialization import tensors_of


class SharedForwards:
    """Computes the transformer calls of requests, either separately or in shared forward passes."""

    def __init__(self, family: Family, model: Any) -> None:
        self.caches: Caches | None = None
        """The model's step caches, or None if the stage does not use any. With step caches, requests do not share
        forward passes."""
        self.branches: GuidanceBranches | None = None
        """Distributes transformer calls across processes. None if this process computes all calls."""
        self._family, self.model = family, model
        has_mixed_lengths = family.mixed_lengths and model is not None and not model.zero_cond_t
        self._mixed_lengths = MixedLengthForward(model) if has_mixed_lengths else None

    def forward_alone(self, state: DiffusionRequestState) -> Callable[[Mapping[str, Any]], Prediction]:
        """Returns a function that computes each transformer call of one request in a separate forward pass."""
        branch = 0

        def forward(inputs: Mapping[str, Any]) -> Prediction:
            nonlocal branch
            if self.caches is None:
                return self.model(**inputs)
            with self.caches.context(f"{state.request_id}/{branch}", total_steps=state.total_steps):
                branch += 1
                return self.model(**inputs)

        return forward

    def forward_together(
        self, states: Sequence[DiffusionRequestState], recorded: Sequence[Sequence[Call]]
    ) -> dict[Call, Prediction]:
        """Computes the recorded calls of all requests in shared forward passes. Returns the prediction for each
        call."""
        if self.branches is None:
            return self._predict(states, recorded)
        return self.branches.predict(recorded, lambda own: self._predict(states, own))

    def disable_mixed_lengths(self) -> None:
        """Prevents calls with different numbers of tokens from sharing a forward pass."""
        self._mixed_lengths = None

    def batch_key(self, state: DiffusionRequestState) -> tuple[object, ...]:
        """Returns a key for grouping requests. The calls of requests with equal keys can share a forward pass."""
        if self.caches is not None:
            return (state.request_id,)
        if self._mixed_lengths is not None:
            return ()
        fields = state.values.get_by_kwargs("denoiser_input_fields")
        size = (state.inputs.height, state.inputs.width, state.inputs.num_frames)
        return (size, tuple(tuple(tensor.shape) for tensor in tensors_of(fields)))

    # -- inner workings

    def _predict(
        self, states: Sequence[DiffusionRequestState], recorded: Sequence[Sequence[Call]]
    ) -> dict[Call, Prediction]:
        groups: dict[object, list[Call]] = defaultdict(list)
        for state, calls in zip(states, recorded, strict=True):
            key = self.batch_key(state)
            for call in calls[::-1] if self._family.joint_guidance == "negative first" else calls:
                groups[key, self._group_key(call)].append(call)
        predictions: dict[Call, Prediction] = {}
        for group in groups.values():
            predictions |= zip(group, self._forward(group), strict=True)
        return predictions

    def _group_key(self, call: Call) -> object:
        if self._mixed_lengths is not None:
            return None if self._mixed_lengths.can_join(call) else call
        # A pipeline that denoises both guidance branches in one forward pass accepts their inputs without grouping.
        return None if self._family.joint_guidance is not None else shape_key(call)

    def _forward(self, group: Sequence[Call]) -> list[Prediction]:
        if len(group) == 1:
            return [self.model(**group[0].inputs)]
        if self._mixed_lengths is not None:
            return self._mixed_lengths.forward(group)
        return split_rows(self.model(**concatenate(group, shared=self._family.shared_inputs)), len(group))
