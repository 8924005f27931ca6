"""LoRA adapters on a transformer, by diffusers and PEFT. One is in use at a time: requests with others take turns."""

import itertools
import warnings
from collections.abc import Mapping
from typing import Any

from stagemesh.common.errors import InvalidRequestError, NotFoundError
from stagemesh.services.engines.adapters.files import Sizes
from stagemesh.services.engines.adapters.registry import check_rank
from stagemesh.services.engines.diffusion.adapters.files import read_lora


class ModelAdapters:
    """Those of one model."""

    def __init__(self, model: Any, max_rank: int) -> None:
        self._model, self._max_rank = model, max_rank
        self._keys: dict[str, str] = {}
        """What PEFT calls them: it makes attributes of the names, which may hold no dots."""
        self._numbers = itertools.count()
        self._selected: tuple[str, float] | None = None

    def load(self, name: str, path: str) -> int:
        """Reads an adapter and checks it; returns its rank. Raises InvalidRequestError for none of this model."""
        lora = read_lora(path)
        check_rank(name, lora.files.rank, most=self._max_rank)
        lora.files.check(self._sizes(lora.files.layers))
        key = f"adapter{next(self._numbers)}"
        try:
            with warnings.catch_warnings():
                # PEFT's, about a second adapter on the model.
                warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
                self._model.load_lora_adapter(lora.matrices(), prefix=None, adapter_name=key, metadata=lora.config)
        except Exception as exc:
            # diffusers clears up, which may fail in turn.
            cause = exc.__context__ or exc
            raise InvalidRequestError(f"adapter {name!r}: {cause}", reason="INVALID_ADAPTER") from exc
        finally:
            self._deactivate()
        self._keys[name] = key
        return lora.files.rank

    def unload(self, name: str) -> None:
        """Forgets an adapter; nothing if it is not known."""
        key = self._keys.pop(name, None)
        if key is not None:
            self._deactivate()
            self._model.delete_adapters(key)

    def select(self, name: str | None, scale: float) -> None:
        """Has the next forwards use an adapter, or none. Raises NotFoundError."""
        wanted = None if name is None else (name, scale)
        if wanted == self._selected:
            return
        if name is None:
            self._model.disable_lora()
            self._selected = None
            return
        if name not in self._keys:
            raise NotFoundError(
                f"there is no adapter {name!r} any more", reason="UNKNOWN_ADAPTER", metadata={"adapter": name}
            )
        self._model.set_adapters(self._keys[name], scale)
        self._model.enable_lora()
        self._selected = wanted

    # -- inner workings

    def _sizes(self, layers: Mapping[str, object]) -> dict[str, Sizes | None]:
        """Of those layers that the model has; None for one that is not linear, which PEFT checks by itself."""
        modules = dict(self._model.named_modules())
        found = {name: modules[name] for name in layers if name in modules}
        return {
            name: Sizes(module.in_features, module.out_features) if hasattr(module, "in_features") else None
            for name, module in found.items()
        }

    def _deactivate(self) -> None:
        self._selected = None
        if getattr(self._model, "peft_config", None):
            # With none active, so that PEFT does not choose another one in the place of one that goes.
            self._model.set_adapters([])
            self._model.disable_lora()
