"""Which calls of a transformer share a forward."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stagemesh.services.engines.diffusion.batching.mixed_rows import MixedRows
from stagemesh.services.engines.diffusion.batching.recorded_calls import Answer, Call, joined, shape_of, split
from stagemesh.services.engines.diffusion.caches.step_caches import Caches
from stagemesh.services.engines.diffusion.model.families import Family
from stagemesh.services.engines.diffusion.parallel.guidance_branches import Branches
from stagemesh.services.engines.diffusion.state import DiffusionRequestState
from stagemesh.services.engines.diffusion.transfer.serialization import tensors_of


class SharedForwards:
    """A transformer's forwards, for one request or for several."""

    def __init__(self, family: Family, model: Any) -> None:
        self.caches: Caches | None = None
        """What the model keeps from step to step; its requests then go one by one."""
        self.branches: Branches | None = None
        """Other processes that compute some of the calls; None to compute all here."""
        self._family, self.model = family, model
        self._mixed = MixedRows(model) if family.mixed_lengths and model is not None and not model.zero_cond_t else None

    def alone(self, state: DiffusionRequestState) -> Callable[[Mapping[str, Any]], Answer]:
        """For the blocks of one request: its calls as they come."""
        branch = 0

        def forward(inputs: Mapping[str, Any]) -> Answer:
            nonlocal branch
            if self.caches is None:
                return self.model(**inputs)
            with self.caches.context(f"{state.request_id}/{branch}", total_steps=state.total_steps):
                branch += 1
                return self.model(**inputs)

        return forward

    def together(
        self, states: Sequence[DiffusionRequestState], recorded: Sequence[Sequence[Call]]
    ) -> dict[Call, Answer]:
        """The answers to the calls that each request's blocks have made."""
        if self.branches is None:
            return self._answers(states, recorded)
        return self.branches.answers(recorded, lambda own: self._answers(states, own))

    def stop_mixing(self) -> None:
        """Rows of different lengths go in forwards of their own from now on."""
        self._mixed = None

    def batch_key(self, state: DiffusionRequestState) -> tuple[object, ...]:
        """Of requests whose calls can share a forward."""
        if self.caches is not None:
            return (state.request_id,)
        if self._mixed is not None:
            return ()
        fields = state.values.get_by_kwargs("denoiser_input_fields")
        size = (state.inputs.height, state.inputs.width, state.inputs.num_frames)
        return (size, tuple(tuple(tensor.shape) for tensor in tensors_of(fields)))

    # -- inner workings

    def _answers(
        self, states: Sequence[DiffusionRequestState], recorded: Sequence[Sequence[Call]]
    ) -> dict[Call, Answer]:
        groups: dict[object, list[Call]] = defaultdict(list)
        for state, calls in zip(states, recorded, strict=True):
            key = self.batch_key(state)
            for call in self._ordered(calls):
                groups[key, self._group(call)].append(call)
        answers: dict[Call, Answer] = {}
        for group in groups.values():
            answers |= zip(group, self._forward(group), strict=True)
        return answers

    def _ordered(self, calls: Sequence[Call]) -> Sequence[Call]:
        return calls[::-1] if self._family.joint_guidance == "negative first" else calls

    def _group(self, call: Call) -> object:
        if self._mixed is not None:
            return None if self._mixed.can_join(call) else call
        # A pipeline that denoises both branches in one forward takes them as they are.
        return None if self._family.joint_guidance is not None else shape_of(call)

    def _forward(self, group: Sequence[Call]) -> list[Answer]:
        if len(group) == 1:
            return [self.model(**group[0].inputs)]
        if self._mixed is not None:
            return self._mixed.forward(group)
        return split(self.model(**joined(group, shared=self._family.shared_inputs)), len(group))
