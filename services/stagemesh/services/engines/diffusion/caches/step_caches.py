"""diffusers' step caches, with a separate cache for each request.

diffusers stores results of previous steps in the hooks of a model's blocks, under a context name. This module uses
context names of the form `<request id>/<index of the transformer call in the step>`, so that requests can alternate. A
request's contexts are freed when the request ends, and serialized when the request is transferred.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeAlias, cast

import diffusers as _diffusers
import torch

from stagemesh.common.errors import NotReadyError
from stagemesh.services.engines.diffusion.caches.cache_dit import CacheDitCaches
from stagemesh.services.engines.diffusion.options import (
    CacheDitOptions,
    DiffusersCacheOptions,
    FirstBlockOptions,
    MagOptions,
    TaylorSeerOptions,
)
from stagemesh.services.engines.diffusion.transfer.serialization import Tree

diffusers: Any = _diffusers

_ATTENTION = r".*blocks\.\d+\.attn\d?"
"""Pattern of the layers whose outputs TaylorSeer extrapolates. diffusers' own pattern misses attn1 and attn2 of Wan."""


class StepCaches:
    """A diffusers step cache for one transformer, with a separate context for each transformer call of each request."""

    def __init__(self, model: Any, options: DiffusersCacheOptions) -> None:
        """Enables the step cache on `model`. Raises NotReadyError if the model does not support the step cache."""
        self.options = options
        self._model = model
        self._configs = cache(partial(_config, model, options))
        try:
            model.enable_cache(self._configs(1))
        except (AttributeError, ValueError) as exc:
            raise NotReadyError(
                f"{type(model).__name__} does not support the step cache {options.kind}: {exc}; omit the option "
                "step_cache, or choose another kind",
                reason="UNSUPPORTED_CACHE",
            ) from exc
        self._hooks = _hooks(model)
        self._managers = _managers(self._hooks)
        if not self._managers:
            raise NotReadyError(
                f"{type(model).__name__} has no layer that the step cache {options.kind} supports; choose another kind",
                reason="UNSUPPORTED_CACHE",
            )

    @contextmanager
    def context(self, name: str, *, total_steps: int) -> Generator[None]:
        """Selects the cache context of one forward pass.

        `name` is `<request id>/<index of the transformer call in the step>`. `total_steps` is the request's number of
        steps.
        """
        if isinstance(self.options, MagOptions):
            # The steps that may be skipped depend on the number of steps, which differs between requests.
            for hook in self._hooks:
                hook.config = self._configs(total_steps)
        with self._model.cache_context(name):
            yield

    def forget(self, request_id: str) -> None:
        """Frees all cached data of a request."""
        for manager in self._managers:
            for name in _names(manager, request_id):
                del manager._state_cache[name]  # noqa: SLF001

    def export(self, request_id: str) -> list[dict[str, Tree]]:
        """Returns a request's cached data in the format that `restore` accepts.

        The list has one item for each state manager of the model. An item contains the cached data of each transformer
        call, by the call's index in the step.
        """
        return [
            {name.removeprefix(f"{request_id}/"): _tree(manager._state_cache[name]) for name in names}  # noqa: SLF001
            for manager in self._managers
            for names in [_names(manager, request_id)]
        ]

    def restore(self, request_id: str, exported: list[dict[str, Tree]], device: torch.device) -> None:
        """Restores the cached data of a request that `export` returned on another replica. `device` is the device of
        this replica."""
        for manager, states in zip(self._managers, exported, strict=True):
            for name, values in states.items():
                state = manager._state_cls(*manager._init_args, **manager._init_kwargs)  # noqa: SLF001
                vars(state).update(values)
                if hasattr(state, "device"):
                    state.device = device
                manager._state_cache[f"{request_id}/{name}"] = state  # noqa: SLF001

    @property
    def contexts(self) -> int:
        """The total number of cache contexts of all requests."""
        return sum(len(manager._state_cache) for manager in self._managers)  # noqa: SLF001


Caches: TypeAlias = StepCaches | CacheDitCaches


def enable_caches(model: Any, options: DiffusersCacheOptions | CacheDitOptions) -> Caches:
    """Enables the step cache that `options` selects. Raises NotReadyError if the model does not support the step
    cache."""
    return CacheDitCaches(model, options) if isinstance(options, CacheDitOptions) else StepCaches(model, options)


def _config(model: Any, options: DiffusersCacheOptions, steps: int) -> Any:
    match options:
        case FirstBlockOptions():
            return diffusers.FirstBlockCacheConfig(threshold=options.threshold)
        case MagOptions():
            return diffusers.MagCacheConfig(
                threshold=options.threshold,
                max_skip_steps=options.max_skip_steps,
                retention_ratio=options.retention_ratio,
                num_inference_steps=steps,
                mag_ratios=list(options.mag_ratios) or _known_ratios(model),
            )
        case TaylorSeerOptions():
            return diffusers.TaylorSeerCacheConfig(
                cache_interval=options.cache_interval,
                disable_cache_before_step=options.disable_cache_before_step,
                disable_cache_after_step=options.disable_cache_after_step,
                max_order=options.max_order,
                taylor_factors_dtype=model.dtype,
                cache_identifiers=[_ATTENTION],
            )


def _known_ratios(model: Any) -> Any:
    from diffusers.hooks.mag_cache import FLUX_MAG_RATIOS

    if type(model).__name__ != "FluxTransformer2DModel":
        raise ValueError("diffusers has no mag_ratios for this model; measure them with MagCacheConfig(calibrate=True)")
    return FLUX_MAG_RATIOS


def _hooks(model: Any) -> list[Any]:
    registries = [module._diffusers_hook for module in model.modules() if hasattr(module, "_diffusers_hook")]  # noqa: SLF001
    return [hook for registry in registries for hook in registry.hooks.values() if hasattr(hook, "state_manager")]


def _managers(hooks: list[Any]) -> list[Any]:
    """Returns the state managers of the hooks without duplicates, in the order of the model's modules.

    The order is the same in all processes.
    """
    return list({id(hook.state_manager): hook.state_manager for hook in hooks}.values())


def _names(manager: Any, request_id: str) -> list[str]:
    return [name for name in manager._state_cache if name.rpartition("/")[0] == request_id]  # noqa: SLF001


def _tree(state: Any) -> Mapping[str, Tree]:
    """Returns the attributes of a cache state that must be serialized.

    Omits the device and the values that are used only within one forward pass.
    """
    values = cast("dict[str, Tree]", vars(state))
    left_out = ("device", "head_block_input", "head_block_output")
    return {name: value for name, value in values.items() if name not in left_out}
