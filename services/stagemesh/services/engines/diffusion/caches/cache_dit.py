"""DBCache from the optional package cache-dit, with a separate cache for each request.

cache-dit stores cached data in contexts, which are named after the model's blocks. cache-dit expects that requests run
one after the other. This module lets requests alternate by using separate contexts for each transformer call in a
request's step.
"""

import copy
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from stagemesh.common.errors import NotReadyError
from stagemesh.services.engines.diffusion.options import CacheDitOptions
from stagemesh.services.engines.diffusion.transfer.serialization import Tree


class CacheDitCaches:
    """DBCache for one transformer, with the interface of `step_caches.StepCaches`. Cannot transfer cached data to
    another replica."""

    def __init__(self, model: Any, options: CacheDitOptions) -> None:
        """Enables DBCache on `model`. Raises NotReadyError if the package cache-dit is missing or does not support the
        model."""
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
            raise NotReadyError(
                f"{type(model).__name__} does not support the step cache cache_dit: {exc}; omit the option step_cache, "
                "or choose another kind",
                reason="UNSUPPORTED_CACHE",
            ) from exc
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
        """Returns an empty list, because cached data cannot be serialized. A transferred request starts with an empty
        cache."""
        del request_id
        return []

    def restore(self, request_id: str, exported: list[dict[str, Tree]], device: torch.device) -> None:
        """Does nothing, because `export` returns no state."""

    @property
    def contexts(self) -> int:
        """The total number of cache contexts of all requests."""
        return len(self._contexts)
