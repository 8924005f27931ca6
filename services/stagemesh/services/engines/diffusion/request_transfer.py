"""Transfer of requests to another stage or replica: after encoding, between two denoising steps, or after the last
step.
"""

import copy
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import diffusers as _diffusers
from diffusers.modular_pipelines.modular_pipeline import BlockState, PipelineState

from stagemesh.common.errors import InvalidChunkError, UnsupportedError
from stagemesh.common.wire.tensors import Array
from stagemesh.services.engines.diffusion import CONDITIONING, LATENTS, STATE
from stagemesh.services.engines.diffusion.caches import Caches
from stagemesh.services.engines.diffusion.model.declarations import REQUEST_INPUTS
from stagemesh.services.engines.diffusion.model.definition import DECODE, DENOISE, ENCODE
from stagemesh.services.engines.diffusion.model.families import CLASSIC_INDEX, MODULAR_INDEX
from stagemesh.services.engines.diffusion.model.modular_pipeline import ModularStepPipeline
from stagemesh.services.engines.diffusion.serialization import Tree, deserialize, is_serializable, serialize
from stagemesh.services.engines.diffusion.state import DiffusionInputs, DiffusionRequestState

diffusers: Any = _diffusers

_PROMPT_FIELDS = ("prompt", "negative_prompt", "images")
_SCHEDULER, _GENERATOR = "scheduler", "generator"
_CHANGED_INPUTS = frozenset({"height", "width", _GENERATOR})
"""The inputs of a request that blocks may change for later blocks."""
_CONFIG = "_internal_dict"
"""Name of the attribute in which diffusers stores an object's configuration."""


class RequestTransfer:
    """Serializes the requests of a pipeline, and restores requests that other replicas or stages of the same model have
    serialized.
    """

    def __init__(self, pipeline: ModularStepPipeline, folder: Path) -> None:
        self._pipeline = pipeline
        self._model = fingerprint(folder)
        definition = pipeline.definition
        decoder_inputs = _names(definition.inputs(DECODE)) - (REQUEST_INPUTS - _CHANGED_INPUTS)
        tagged = {param.kwargs_type for param in definition.inputs(DENOISE) if param.name is None}
        needed = (_names(definition.inputs(DENOISE)) - (REQUEST_INPUTS - {"height", "width"})) | decoder_inputs
        needed |= {name for name, tag in definition.tags.items() if tag in tagged}
        # Encoders that draw random numbers leave the generator in another state.
        needed |= _names(definition.inputs(ENCODE)) & {_GENERATOR}
        # A stage that only encodes or decodes does not receive the number of frames from the request.
        latents = decoder_inputs | (_names(definition.inputs(DECODE)) & {"num_frames"})
        self._names = {CONDITIONING: needed, LATENTS: latents, STATE: needed}

    def serialize(self, state: DiffusionRequestState, kind: str) -> Array:
        """Returns data of a request, serialized as uint8[bytes]. `kind` selects the data:

        - CONDITIONING: the encoding results that denoising and decoding need.
        - LATENTS: the decoder's inputs. Before the last step, decoding these inputs yields a preview.
        - STATE: all data needed to resume the request after its latest completed step.
        """
        tree = self._state(state) if kind == STATE else self._values(self._pipeline.end_loop(state), kind)
        return serialize(tree, kind=kind, model=self._model)

    def restore_values(self, state: DiffusionRequestState, kind: str, data: Array) -> None:
        """Adds values to the request `state`. `data` contains the values, as serialized by another stage. `kind` is
        CONDITIONING or LATENTS.

        Raises InvalidChunkError if `data` is invalid or has another kind.
        """
        values = self._deserialize(kind, data)
        if unknown := values.keys() - self._names[kind]:
            raise InvalidChunkError(f"the model has no input {', '.join(sorted(map(str, unknown)))}")
        self._pipeline.add_values(state, values)

    def restore_state(self, request_id: str, inputs: DiffusionInputs, data: Array) -> DiffusionRequestState:
        """Returns a request that resumes after the latest completed step of the STATE in `data`.

        Raises InvalidChunkError if `data` is invalid or does not match `inputs`.
        """
        tree = self._deserialize(STATE, data)
        state = DiffusionRequestState(request_id, inputs)
        try:
            self._check(inputs, settings=tree["asked"], prompt_digest=tree["texts"])
            state.step_index, state.total_steps = int(tree["step_index"]), int(tree["total_steps"])
            if not 0 <= state.step_index < state.total_steps:
                raise InvalidChunkError(f"the state is at step {state.step_index} of {state.total_steps}")
            state.values = PipelineState(values=tree["values"], kwargs_mapping=tree["kinds"])
            state.loop = BlockState(**tree["loop"])
            state.loop_path = tuple(tree["path"])
            for name, values in tree["schedulers"].items():
                state.schedulers[name] = self._scheduler(name, values)
            for name, values in tree["loop_schedulers"].items():
                state.loop[name] = self._scheduler(_SCHEDULER, values)
            # The loop and the decoder draw from the same generator.
            state.values.values |= {name: value for name, value in tree["loop"].items() if name == _GENERATOR}
            if self._caches is not None:
                self._caches.restore(request_id, tree["kept"], self._pipeline.device)
            self._pipeline.adopt(state)
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise InvalidChunkError(f"the state was not serialized by this version: {exc!r}") from exc
        return state

    # -- inner workings

    def _settings(self, inputs: DiffusionInputs) -> dict[str, Tree]:
        """Returns the settings that must have the same values when a request is serialized and when it resumes, by
        name.
        """
        excluded = (*_PROMPT_FIELDS, "requested")
        numbers = {name: value for name, value in vars(inputs).items() if name not in excluded}
        transformer = getattr(self._pipeline.components, "transformer", None)
        step_cache = repr(self._caches.options) if self._caches is not None else None
        return {**numbers, "dtype": str(getattr(transformer, "dtype", None)), "step_cache": step_cache}

    def _check(self, inputs: DiffusionInputs, *, settings: dict[str, Tree], prompt_digest: str) -> None:
        for name, expected in self._settings(inputs).items():
            if settings[name] != expected:
                raise InvalidChunkError(
                    f"the state's {name} is {settings[name]}, but the request's is {expected}; resume with the value "
                    "of the state"
                )
        # A request that resumes may omit its prompt.
        if inputs.prompt and prompt_digest != _prompt_digest(inputs):
            raise InvalidChunkError("the state belongs to another prompt; resume with the same prompt")

    @property
    def _caches(self) -> Caches | None:
        return self._pipeline.forwards.caches

    def _scheduler(self, name: str, variables: dict[str, Tree]) -> Any:
        scheduler = copy.deepcopy(getattr(self._pipeline.components, name))
        vars(scheduler).update(variables)
        return scheduler

    def _deserialize(self, kind: str, data: Array) -> dict[str, Tree]:
        return deserialize(data, kind=kind, model=self._model, device=self._pipeline.device)

    def _state(self, state: DiffusionRequestState) -> dict[str, Tree]:
        if state.call is not None:
            raise UnsupportedError(
                "the model's denoising loop cannot be stopped and resumed elsewhere; omit checkpoints and pauses",
                metadata={"ability": "checkpoints"},
            )
        loop: dict[str, Any] = state.loop.as_dict() if state.loop is not None else {}
        return {
            "step_index": state.step_index,
            "total_steps": state.total_steps,
            "asked": self._settings(state.inputs),
            "texts": _prompt_digest(state.inputs),
            "values": self._values(state, STATE),
            "kinds": state.values.kwargs_mapping,
            "path": list(state.loop_path),
            # Other variables, such as the model that the step has chosen, are set by the step or by the loop's start.
            "loop": {name: value for name, value in loop.items() if is_serializable(value)},
            "loop_schedulers": {name: _variables(value) for name, value in loop.items() if _is_scheduler(value)},
            "schedulers": {name: _variables(scheduler) for name, scheduler in state.schedulers.items()},
            "kept": self._caches.export(state.request_id) if self._caches is not None else [],
        }

    def _values(self, state: DiffusionRequestState, kind: str) -> dict[str, Tree]:
        values = {name: state.values.get(name) for name in sorted(self._names[kind])}
        return {name: value for name, value in values.items() if value is not None}


def fingerprint(folder: Path) -> str:
    """Returns a digest of the configuration files of the model in `folder` and of the version of diffusers. Ignores the
    weights.
    """
    digest = hashlib.blake2b(diffusers.__version__.encode(), digest_size=8)
    for path in (MODULAR_INDEX, CLASSIC_INDEX, "transformer/config.json", "scheduler/scheduler_config.json"):
        if (folder / path).exists():
            digest.update((folder / path).read_bytes())
    return digest.hexdigest()


def _prompt_digest(inputs: DiffusionInputs) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for data in (inputs.prompt.encode(), (inputs.negative_prompt or "").encode(), *inputs.images):
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _variables(scheduler: Any) -> dict[str, Tree]:
    return {name: value for name, value in cast("dict[str, Any]", vars(scheduler)).items() if name != _CONFIG}


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, diffusers.SchedulerMixin)


def _names(params: Iterable[Any]) -> set[str]:
    return {param.name for param in params if param.name is not None}
