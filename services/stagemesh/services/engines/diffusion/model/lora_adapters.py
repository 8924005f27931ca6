"""The LoRA adapters of a pipeline's denoisers, which diffusers and PEFT apply. Several may be active at a time."""

import itertools
import warnings
from typing import Any

from stagemesh.common.errors import InvalidRequestError, NotFoundError
from stagemesh.common.requests.adapter_selection import SelectedAdapter, parse_adapters
from stagemesh.services.engines.adapters import check_rank
from stagemesh.services.engines.diffusion.model.lora_files import check_part, denoisers, read_lora


class ModelAdapters:
    """Loads, unloads and activates the LoRA adapters of one pipeline."""

    def __init__(self, pipeline: Any, max_rank: int) -> None:
        """Creates the adapters of a diffusers pipeline, classic or modular."""
        self._pipeline, self._max_rank = pipeline, max_rank
        self._keys: dict[str, str] = {}
        """The name of each loaded adapter in PEFT, by adapter name. PEFT's names may not contain dots, but adapter
        names may."""
        self._numbers = itertools.count()
        self._selected: tuple[SelectedAdapter, ...] = ()

    def load(self, name: str, path: str) -> int:
        """Loads an adapter from the folder or file `path` and returns its rank.

        Raises InvalidRequestError if the adapter does not fit this pipeline. The pipeline is unchanged then.
        """
        models = denoisers(self._pipeline)
        parts = read_lora(path, self._pipeline)
        rank = max(check_part(part, models[part.component]) for part in parts)
        check_rank(name, rank, most=self._max_rank)
        key = f"adapter{next(self._numbers)}"
        try:
            with warnings.catch_warnings():
                # PEFT warns about a second adapter on the model.
                warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
                for part in parts:
                    # The arguments of diffusers' own `load_lora_weights`.
                    models[part.component].load_lora_adapter(
                        part.matrices,
                        prefix=part.prefix,
                        adapter_name=key,
                        metadata=part.config,
                        network_alphas=part.alphas,
                        low_cpu_mem_usage=True,
                    )
        except Exception as exc:
            self._delete(key)
            # diffusers cleans up after an error, which may raise another error.
            cause = exc.__context__ or exc
            raise InvalidRequestError(f"adapter {name!r}: {cause}", reason="INVALID_ADAPTER") from exc
        finally:
            self._deactivate()
        self._keys[name] = key
        return rank

    def unload(self, name: str) -> None:
        """Removes an adapter from the pipeline. Does nothing if the adapter is not loaded."""
        key = self._keys.pop(name, None)
        if key is not None:
            self._deactivate()
            self._delete(key)

    def select(self, selection: str | None, scale: float) -> None:
        """Activates adapters for the next forward passes. All other adapters are inactive.

        `selection` has the form that `parse_adapters` reads. `scale` multiplies the scale of each of them. If
        `selection` is None, deactivates all adapters. Raises NotFoundError if an adapter is not loaded.
        """
        wanted = tuple(SelectedAdapter(name, each * scale) for name, each in parse_adapters(selection or ""))
        if wanted == self._selected:
            return
        for name, _ in wanted:
            if name not in self._keys:
                raise NotFoundError(
                    f"adapter {name!r} is no longer loaded", reason="UNKNOWN_ADAPTER", metadata={"adapter": name}
                )
        for model in self._adapted():
            own = [each for each in wanted if self._keys[each.name] in model.peft_config]
            model.set_adapters([self._keys[each.name] for each in own], [each.scale for each in own])
            if own:
                model.enable_lora()
            else:
                model.disable_lora()
        self._selected = wanted

    # -- inner workings

    def _adapted(self) -> list[Any]:
        return [model for model in denoisers(self._pipeline).values() if getattr(model, "peft_config", None)]

    def _delete(self, key: str) -> None:
        for model in self._adapted():
            if key in model.peft_config:
                model.delete_adapters(key)

    def _deactivate(self) -> None:
        self._selected = ()
        for model in self._adapted():
            # With no active adapter, PEFT does not activate another adapter when one is deleted.
            model.set_adapters([])
            model.disable_lora()
