"""What of a request goes to another stage or replica: after encoding, between two steps, and after the last."""

import copy
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import diffusers as _diffusers
from diffusers.modular_pipelines.modular_pipeline import BlockState, PipelineState

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.tensors import Array
from stagemesh.services.engines.diffusion.caches.step_caches import Caches
from stagemesh.services.engines.diffusion.model.modular import ModularStepPipeline
from stagemesh.services.engines.diffusion.state import DiffusionInputs, DiffusionRequestState
from stagemesh.services.engines.diffusion.transfer.serialization import Tree, pack, unpack

diffusers: Any = _diffusers

_CONDITIONING, _LATENTS, _STATE = "conditioning", "latents", "state"
_TEXTS = ("prompt", "negative_prompt", "image")
_CONFIG = "_internal_dict"
"""Where diffusers keeps what an object was made from."""


class RequestTransfer:
    """Packs the requests of one pipeline, and unpacks what another stage or replica of the same model has packed."""

    def __init__(self, pipeline: ModularStepPipeline, folder: Path) -> None:
        self._pipeline = pipeline
        self._model = fingerprint(folder)
        whole = getattr(diffusers, pipeline.family.blocks)()
        given = set(pipeline.given_names)
        self._denoise_inputs = _names(whole.sub_blocks["denoise"].inputs) - given
        self._decode_inputs = _names(whole.sub_blocks["decode"].inputs) - (given - {"height", "width"})

    def pack_conditioning(self, state: DiffusionRequestState) -> Array:
        """What encoding has made, as uint8[bytes]."""
        return self._pack(_CONDITIONING, self._values(state, self._denoise_inputs | self._decode_inputs))

    def unpack_conditioning(self, state: DiffusionRequestState, packed: Array) -> None:
        """Gives a request what encoding has made elsewhere."""
        self._take(state, self._unpack(_CONDITIONING, packed), self._denoise_inputs | self._decode_inputs)

    def pack_latents(self, state: DiffusionRequestState) -> Array:
        """What decoding needs, as uint8[bytes]; between two steps it is what there is of the picture."""
        return self._pack(_LATENTS, self._values(self._pipeline.so_far(state), self._decode_inputs))

    def unpack_latents(self, state: DiffusionRequestState, packed: Array) -> None:
        """Gives a request what is to be decoded."""
        self._take(state, self._unpack(_LATENTS, packed), self._decode_inputs)

    def pack_state(self, state: DiffusionRequestState) -> Array:
        """All that is needed to go on from the step where it is, as uint8[bytes]."""
        needed = self._denoise_inputs | self._decode_inputs
        return self._pack(
            _STATE,
            {
                "step_index": state.step_index,
                "total_steps": state.total_steps,
                "asked": self._asked(state.inputs),
                "texts": _texts(state.inputs),
                "values": self._values(state, needed),
                "kinds": state.values.kwargs_mapping,
                "loop": state.loop.as_dict() if state.loop is not None else None,
                "scheduler": _attributes(state.scheduler),
                "kept": self._caches.kept(state.request_id) if self._caches is not None else [],
            },
        )

    def unpack_state(self, request_id: str, inputs: DiffusionInputs, packed: Array) -> DiffusionRequestState:
        """A request as it was packed. Raises InvalidChunkError for one that asks for something else."""
        tree = self._unpack(_STATE, packed)
        state = DiffusionRequestState(request_id, inputs)
        try:
            self._check(inputs, asked=tree["asked"], texts=tree["texts"])
            state.step_index, state.total_steps = int(tree["step_index"]), int(tree["total_steps"])
            if not 0 <= state.step_index < state.total_steps:
                raise InvalidChunkError(f"the state is at step {state.step_index} of {state.total_steps}")
            state.values = PipelineState(values=tree["values"], kwargs_mapping=tree["kinds"])
            state.loop = BlockState(**tree["loop"])
            state.scheduler = self._scheduler(tree["scheduler"])
            if self._caches is not None:
                self._caches.restore(request_id, tree["kept"], self._pipeline.device)
            self._pipeline.adopt(state)
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise InvalidChunkError(f"the state is not as this version packs it: {exc!r}") from exc
        return state

    # -- inner workings

    def _asked(self, inputs: DiffusionInputs) -> dict[str, Tree]:
        """What a state goes on with: what was asked for in numbers, and how the model computes."""
        numbers = {name: value for name, value in vars(inputs).items() if name not in _TEXTS}
        transformer = getattr(self._pipeline.components, "transformer", None)
        step_cache = repr(self._caches.options) if self._caches is not None else None
        return {**numbers, "dtype": str(getattr(transformer, "dtype", None)), "step_cache": step_cache}

    def _check(self, inputs: DiffusionInputs, *, asked: dict[str, Tree], texts: str) -> None:
        for name, expected in self._asked(inputs).items():
            if asked[name] != expected:
                raise InvalidChunkError(
                    f"the state's {name} is {asked[name]}, the request's {expected}; go on with what it began with"
                )
        # One that goes on need not say again what its prompt was.
        if inputs.prompt and texts != _texts(inputs):
            raise InvalidChunkError("the state's prompt is not the request's; go on with what it began with")

    @property
    def _caches(self) -> Caches | None:
        return self._pipeline.forwarding.caches

    def _pack(self, kind: str, tree: dict[str, Tree]) -> Array:
        return pack(tree, kind=kind, model=self._model)

    def _unpack(self, kind: str, packed: Array) -> dict[str, Tree]:
        return unpack(packed, kind=kind, model=self._model, device=self._pipeline.device)

    def _values(self, state: DiffusionRequestState, names: Iterable[str]) -> dict[str, Tree]:
        found = {name: state.values.get(name) for name in sorted(names)}
        return {name: value for name, value in found.items() if value is not None}

    def _take(self, state: DiffusionRequestState, values: dict[str, Tree], names: set[str]) -> None:
        if unknown := values.keys() - names:
            raise InvalidChunkError(f"the model has no use for {', '.join(sorted(map(str, unknown)))}")
        for name, value in values.items():
            state.values.set(name, value)

    def _scheduler(self, values: dict[str, Tree]) -> Any:
        scheduler = copy.deepcopy(self._pipeline.components.scheduler)
        vars(scheduler).update(values)
        return scheduler


def fingerprint(folder: Path) -> str:
    """Of a model: its configuration, not its weights, and the version of diffusers."""
    digest = hashlib.blake2b(diffusers.__version__.encode(), digest_size=8)
    for path in ("model_index.json", "transformer/config.json", "scheduler/scheduler_config.json"):
        if (folder / path).exists():
            digest.update((folder / path).read_bytes())
    return digest.hexdigest()


def _texts(inputs: DiffusionInputs) -> str:
    """Of what a request says and shows, a digest."""
    digest = hashlib.blake2b(digest_size=16)
    for name in _TEXTS:
        value = getattr(inputs, name) or ""
        data = value if isinstance(value, bytes) else value.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _attributes(made: Any) -> dict[str, Tree]:
    """Of an object of diffusers, all but what it was made from."""
    attributes = cast("dict[str, Any]", vars(made))
    return {name: value for name, value in attributes.items() if name != _CONFIG}


def _names(params: Iterable[Any]) -> set[str]:
    return {param.name for param in params if param.name is not None}
