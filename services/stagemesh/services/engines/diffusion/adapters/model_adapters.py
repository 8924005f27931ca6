"""Applies LoRA adapters to a transformer through diffusers and PEFT. At most one adapter is active at a time."""

import itertools
import warnings
from collections.abc import Mapping
from typing import Any

from stagemesh.common.errors import InvalidRequestError, NotFoundError
from stagemesh.services.engines.adapters.files import Sizes
from stagemesh.services.engines.adapters.manager import check_rank
from stagemesh.services.engines.diffusion.adapters.files import read_lora


class ModelAdapters:
    """Loads, unloads and activates the LoRA adapters of one model."""

    def __init__(self, model: Any, max_rank: int) -> None:
        self._model, self._max_rank = model, max_rank
        self._keys: dict[str, str] = {}
        """PEFT's name for each adapter, by adapter name. Adapter names may contain dots, but PEFT's names may not."""
        self._numbers = itertools.count()
        self._selected: tuple[str, float] | None = None

    def load(self, name: str, path: str) -> int:
        """Loads an adapter from the folder `path` and returns its LoRA rank.

        Raises InvalidRequestError if the adapter does not fit this model.
        """
        lora = read_lora(path)
        check_rank(name, lora.files.rank, most=self._max_rank)
        lora.files.check(self._sizes(lora.files.layers))
        key = f"adapter{next(self._numbers)}"
        try:
            with warnings.catch_warnings():
                # PEFT warns about a second adapter on the model.
                warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
                self._model.load_lora_adapter(lora.matrices(), prefix=None, adapter_name=key, metadata=lora.config)
        except Exception as exc:
            # diffusers cleans up after an error, which may raise another error.
            cause = exc.__context__ or exc
            raise InvalidRequestError(f"adapter {name!r}: {cause}", reason="INVALID_ADAPTER") from exc
        finally:
            self._deactivate()
        self._keys[name] = key
        return lora.files.rank

    def unload(self, name: str) -> None:
        """Unloads an adapter. Does nothing if the adapter is not loaded."""
        key = self._keys.pop(name, None)
        if key is not None:
            self._deactivate()
            self._model.delete_adapters(key)

    def select(self, name: str | None, scale: float) -> None:
        """Activates an adapter with the strength `scale` for the next forward passes.

        If `name` is None, deactivates all adapters. Raises NotFoundError if the adapter is not loaded.
        """
        wanted = None if name is None else (name, scale)
        if wanted == self._selected:
            return
        if name is None:
            self._model.disable_lora()
            self._selected = None
            return
        if name not in self._keys:
            raise NotFoundError(
                f"adapter {name!r} is no longer loaded", reason="UNKNOWN_ADAPTER", metadata={"adapter": name}
            )
        self._model.set_adapters(self._keys[name], scale)
        self._model.enable_lora()
        self._selected = wanted

    # -- inner workings

    def _sizes(self, layers: Mapping[str, object]) -> dict[str, Sizes | None]:
        """Returns the input and output sizes of the named layers that the model has.

        The value for a layer that is not linear is None, because PEFT itself checks such layers.
        """
        modules = dict(self._model.named_modules())
        known = {name: modules[name] for name in layers if name in modules}
        return {
            name: Sizes(module.in_features, module.out_features) if hasattr(module, "in_features") else None
            for name, module in known.items()
        }

    def _deactivate(self) -> None:
        self._selected = None
        if getattr(self._model, "peft_config", None):
            # With no active adapter, PEFT does not activate another adapter when one is deleted.
            self._model.set_adapters([])
            self._model.disable_lora()
