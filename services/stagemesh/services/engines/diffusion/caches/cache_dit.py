"""cache-dit's DBCache, which is a package of its own, with what it keeps kept for each request.

It keeps all in contexts by the names of a model's blocks, for one request after the other. Here each request, and each
call of a step, is given contexts of its own.
"""

import copy
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from stagemesh.common.errors import NotReadyError
from stagemesh.services.engines.diffusion.caches.options import CacheDitOptions
from stagemesh.services.engines.diffusion.transfer.serialization import Tree


class CacheDitCaches:
    """On one transformer; see `step_caches.StepCaches`. What is kept stays here when a request goes on elsewhere."""

    def __init__(self, model: Any, options: CacheDitOptions) -> None:
        """Turns it on; raises NotReadyError without the package, and for a model that it does not know."""
        self.options = options
        try:
            cache_dit: Any = import_module("cache_dit")
        except ImportError as exc:
            raise NotReadyError(
                "the step cache cache_dit needs the package cache-dit; install it beside Stagemesh",
                reason="MISSING_MODULE",
            ) from exc
        config = cache_dit.DBCacheConfig(
            num_inference_steps=None,
            Fn_compute_blocks=options.first_blocks,
            Bn_compute_blocks=options.last_blocks,
            residual_diff_threshold=options.threshold,
            max_warmup_steps=options.warmup_steps,
            max_continuous_cached_steps=options.max_skip_steps,
            # Both branches of guidance have contexts of their own.
            enable_separate_cfg=False,
        )
        try:
            cache_dit.enable_cache(model, cache_config=config)
        except (AssertionError, AttributeError, ValueError) as exc:
            raise NotReadyError(
                f"{type(model).__name__} cannot have the step cache cache_dit: {exc}; leave the option step_cache out, "
                "or choose another kind",
                reason="UNSUPPORTED_CACHE",
            ) from exc
        self._manager = model._context_manager  # noqa: SLF001  # it has no other way in
        self._fresh: Mapping[str, Any] = copy.deepcopy(self._manager._cached_context_manager)  # noqa: SLF001
        self._contexts: dict[str, Mapping[str, Any]] = {}

    @contextmanager
    def context(self, name: str, *, total_steps: int) -> Generator[None]:
        """See `StepCaches`."""
        del total_steps
        if name not in self._contexts:
            self._contexts[name] = copy.deepcopy(self._fresh)
        self._manager._cached_context_manager = self._contexts[name]  # noqa: SLF001
        yield

    def forget(self, request_id: str) -> None:
        """See `StepCaches`."""
        for name in [name for name in self._contexts if name.rpartition("/")[0] == request_id]:
            del self._contexts[name]
        # Of the last forward, which may have been this request's.
        self._manager._cached_context_manager = self._fresh  # noqa: SLF001
        self._manager._current_context = None  # noqa: SLF001

    def kept(self, request_id: str) -> list[dict[str, Tree]]:
        """Nothing: a request that goes on elsewhere begins there as if it were new."""
        del request_id
        return []

    def restore(self, request_id: str, kept: list[dict[str, Tree]], device: torch.device) -> None:
        """See `kept`."""

    @property
    def contexts(self) -> int:
        """How many are kept, of all requests together."""
        return len(self._contexts)
