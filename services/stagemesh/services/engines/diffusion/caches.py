"""The caches of the diffusion engine: step caches, which skip parts of denoising steps, and prompt embeddings. The
cached data of different requests is separate.
"""

import copy
from collections import OrderedDict
from collections.abc import Generator, Hashable, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache, partial
from importlib import import_module
from typing import Any, TypeAlias, cast

import diffusers as _diffusers
import torch

from stagemesh.common.errors import NotReadyError
from stagemesh.services.engines.abilities import CacheStatistics
from stagemesh.services.engines.diffusion.options import CacheDitOptions, DiffusersCacheOptions, StepCacheOptions
from stagemesh.services.engines.diffusion.serialization import Tree, tensors_of
from stagemesh.services.engines.torch_setup import UnusableOptionError

diffusers: Any = _diffusers

_ATTENTION = r".*blocks\.\d+\.attn\d?"
"""Regular expression for the names of the layers whose outputs TaylorSeer extrapolates. diffusers' own pattern does not
match the layers attn1 and attn2 of Wan."""


class StepCaches:
    """A step cache of diffusers for one transformer. Has a separate context for each transformer call of each
    request.
    """

    def __init__(self, model: Any, options: DiffusersCacheOptions) -> None:
        """Enables the step cache on `model`. Raises NotReadyError if the model does not support this kind of step
        cache.
        """
        self.options = options
        self._model = model
        self._configs = cache(partial(_config, model, options))
        try:
            model.enable_cache(self._configs(1))
        except (AttributeError, ValueError) as exc:
            raise _unsupported(model, options, exc) from exc
        self._hooks = _hooks(model)
        # Without duplicates, in the order of the model's modules, which is the same in all processes.
        self._managers = list({id(hook.state_manager): hook.state_manager for hook in self._hooks}.values())
        if not self._managers:
            raise _unsupported(model, options, "the model has no layer that this kind supports")

    @contextmanager
    def context(self, name: str, *, total_steps: int) -> Generator[None]:
        """Selects the cache context for the forward pass in the `with` block.

        `name` is `<request id>/<index of the transformer call in the step>`. `total_steps` is the request's total
        number of denoising steps.
        """
        if self.options.kind == "mag":
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

        The list has one item for each of diffusers' state managers in the model. An item contains the cached data of
        each transformer call, by the call's index in the step as a string.
        """
        return [
            {name.removeprefix(f"{request_id}/"): _tree(manager._state_cache[name]) for name in names}  # noqa: SLF001
            for manager in self._managers
            for names in [_names(manager, request_id)]
        ]

    def restore(self, request_id: str, exported: list[dict[str, Tree]], device: torch.device) -> None:
        """Restores the cached data of a request. `exported` is the result of `export` on another replica, and `device`
        is the device of this replica.
        """
        for manager, states in zip(self._managers, exported, strict=True):
            for name, values in states.items():
                state = manager._state_cls(*manager._init_args, **manager._init_kwargs)  # noqa: SLF001
                vars(state).update(values)
                if hasattr(state, "device"):
                    state.device = device
                manager._state_cache[f"{request_id}/{name}"] = state  # noqa: SLF001


class CacheDitCaches:
    """The step cache DBCache of cache-dit for one transformer, with the same methods as `StepCaches`. Its cached data
    cannot be transferred to another replica.
    """

    def __init__(self, model: Any, options: CacheDitOptions) -> None:
        """Enables DBCache on `model`. Raises NotReadyError if the package cache-dit is not installed or does not
        support the model.
        """
        self.options = options
        try:
            cache_dit: Any = import_module("cache_dit")
        except ImportError as exc:
            raise NotReadyError(
                "the step cache cache_dit needs the package cache-dit; install it in addition to Stagemesh",
                reason="MISSING_MODULE",
            ) from exc
        config = cache_dit.DBCacheConfig(
            num_inference_steps=None,
            Fn_compute_blocks=options.first_blocks,
            Bn_compute_blocks=options.last_blocks,
            residual_diff_threshold=options.threshold,
            max_warmup_steps=options.warmup_steps,
            max_continuous_cached_steps=options.max_skip_steps,
            # Each guidance branch already has its own contexts.
            enable_separate_cfg=False,
        )
        try:
            cache_dit.enable_cache(model, cache_config=config)
        except (AssertionError, AttributeError, ValueError) as exc:
            raise _unsupported(model, options, exc) from exc
        self._manager = model._context_manager  # noqa: SLF001  # cache-dit has no public access to it
        self._fresh: Mapping[str, Any] = copy.deepcopy(self._manager._cached_context_manager)  # noqa: SLF001
        self._contexts: dict[str, Mapping[str, Any]] = {}

    @contextmanager
    def context(self, name: str, *, total_steps: int) -> Generator[None]:
        del total_steps
        if name not in self._contexts:
            self._contexts[name] = copy.deepcopy(self._fresh)
        self._manager._cached_context_manager = self._contexts[name]  # noqa: SLF001
        yield

    def forget(self, request_id: str) -> None:
        for name in [name for name in self._contexts if name.rpartition("/")[0] == request_id]:
            del self._contexts[name]
        # The last forward pass may have used contexts of this request.
        self._manager._cached_context_manager = self._fresh  # noqa: SLF001
        self._manager._current_context = None  # noqa: SLF001

    def export(self, request_id: str) -> list[dict[str, Tree]]:
        """Returns an empty list, because the data that cache-dit caches cannot be serialized. A transferred request
        starts with an empty cache.
        """
        del request_id
        return []

    def restore(self, request_id: str, exported: list[dict[str, Tree]], device: torch.device) -> None:
        """Does nothing, because `export` returns no cached data."""


Caches: TypeAlias = StepCaches | CacheDitCaches


def enable_caches(model: Any, options: StepCacheOptions) -> Caches:
    """Enables the step cache that `options` selects on `model` and returns it. Raises NotReadyError if the model does
    not support this kind of step cache.
    """
    return CacheDitCaches(model, options) if isinstance(options, CacheDitOptions) else StepCaches(model, options)


def _unsupported(model: Any, options: StepCacheOptions, problem: object) -> UnusableOptionError:
    return UnusableOptionError(
        f"{type(model).__name__} does not support the step cache {options.kind}: {problem}; omit the option "
        "step_cache, or choose another kind"
    )


def _config(model: Any, options: DiffusersCacheOptions, steps: int) -> Any:
    # The options have the names of diffusers' parameters.
    parameters = asdict(options)
    del parameters["kind"]
    if options.kind == "mag":
        parameters["mag_ratios"] = list(options.mag_ratios) or _known_ratios(model)
        return diffusers.MagCacheConfig(**parameters, num_inference_steps=steps)
    if options.kind == "taylor_seer":
        parameters |= {"taylor_factors_dtype": model.dtype, "cache_identifiers": [_ATTENTION]}
        return diffusers.TaylorSeerCacheConfig(**parameters)
    return diffusers.FirstBlockCacheConfig(**parameters)


def _known_ratios(model: Any) -> Any:
    from diffusers.hooks.mag_cache import FLUX_MAG_RATIOS

    if type(model).__name__ != "FluxTransformer2DModel":
        raise ValueError("diffusers has no mag_ratios for this model; measure them with MagCacheConfig(calibrate=True)")
    return FLUX_MAG_RATIOS


def _hooks(model: Any) -> list[Any]:
    registries = [module._diffusers_hook for module in model.modules() if hasattr(module, "_diffusers_hook")]  # noqa: SLF001
    return [hook for registry in registries for hook in registry.hooks.values() if hasattr(hook, "state_manager")]


def _names(manager: Any, request_id: str) -> list[str]:
    return [name for name in manager._state_cache if name.rpartition("/")[0] == request_id]  # noqa: SLF001


def _tree(state: Any) -> Mapping[str, Tree]:
    """Returns the attributes of a cache state that must be serialized, by name.

    Omits the device and the values that are used only within one forward pass.
    """
    values = cast("dict[str, Tree]", vars(state))
    left_out = ("device", "head_block_input", "head_block_output")
    return {name: value for name, value in values.items() if name not in left_out}


class PromptCache:
    """A least-recently-used cache of prompt embeddings with a size limit in bytes.

    Requests share the cached values and must not modify them.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[Hashable, tuple[Mapping[str, Any], int]] = OrderedDict()
        self._size_bytes = self._hits = self._misses = 0

    @property
    def statistics(self) -> CacheStatistics:
        """The current size and the size limit of the cache in bytes, and its numbers of hits and misses since
        construction.
        """
        return CacheStatistics(
            entries=len(self._entries),
            size_bytes=self._size_bytes,
            limit_bytes=self._limit_bytes,
            hits=self._hits,
            misses=self._misses,
        )

    def get(self, key: Hashable) -> Mapping[str, Any] | None:
        """Returns the cached embeddings of a prompt, or None if the prompt is not cached."""
        if not self._limit_bytes:
            return None
        entry = self._entries.get(key)
        if entry is None:
            self._misses += 1
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Hashable, values: Mapping[str, Any]) -> None:
        """Caches a prompt's embeddings. Evicts the least recently used prompts to stay within the size limit.

        Does nothing if the prompt is already cached or if the embeddings are larger than the limit.
        """
        size_bytes = sum(tensor.nbytes for value in values.values() for tensor in tensors_of(value))
        if size_bytes > self._limit_bytes or key in self._entries:
            return
        self._entries[key] = (values, size_bytes)
        self._size_bytes += size_bytes
        while self._size_bytes > self._limit_bytes:
            _, (_, freed_bytes) = self._entries.popitem(last=False)
            self._size_bytes -= freed_bytes

    def clear(self) -> CacheStatistics:
        """Removes all entries and returns the new statistics. Does not reset the numbers of hits and misses."""
        self._entries.clear()
        self._size_bytes = 0
        return self.statistics
