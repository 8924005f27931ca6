"""Checks the stages of a pipeline file against the installed engines and models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagemesh.common import settings
from stagemesh.common.descriptors import (
    EngineDescriptor,
    Signature,
    TransformDescriptor,
    load_engine_descriptor,
    load_transform_descriptor,
)
from stagemesh.common.errors import StagemeshError
from stagemesh.orchestrator.spec.checks.problems import Problems, suggest
from stagemesh.orchestrator.spec.model import Stage
from stagemesh.orchestrator.spec.schema import PipelineFile, StageEntry
from stagemesh.orchestrator.spec.source.origins import KeyPath


@dataclass(frozen=True)
class Catalog:
    """Loads the descriptors of engines and transforms by name.

    Both functions raise NotFoundError if the name is unknown.
    """

    engine: Callable[[str], EngineDescriptor] = load_engine_descriptor
    transform: Callable[[str], TransformDescriptor] = load_transform_descriptor


@dataclass(frozen=True)
class StageResolver:
    """Converts the stages of a pipeline file to checked stages. Does not resolve their conditions.

    Reports errors to `problems`.
    """

    catalog: Catalog
    problems: Problems
    check_models: bool
    fetch_hint: str
    """The text that tells the user how to obtain a missing model."""

    def resolve(self, file: PipelineFile) -> Mapping[str, Stage]:
        """Returns the stages, by name, that have a valid engine and signature."""
        stages = {name: self._stage(name, entry) for name, entry in file.stages.items()}
        return {name: stage for name, stage in stages.items() if stage is not None}

    def _stage(self, name: str, entry: StageEntry) -> Stage | None:
        path: KeyPath = ("stages", name)
        try:
            engine = self.catalog.engine(entry.engine)
        except StagemeshError as exc:
            self.problems.add((*path, "engine"), exc.message)
            return None
        self._check_options(path, entry, engine)
        signature = self._signature(path, entry, engine)
        if signature is None:
            return None
        model_path = self._find_model(path, entry, engine)
        resolved: dict[str, Any] = {"name": name, "signature": signature, "model_path": model_path}
        return Stage.model_construct(**{**dict(entry), **resolved})

    def _signature(self, path: KeyPath, entry: StageEntry, engine: EngineDescriptor) -> Signature | None:
        if engine.needs_function and entry.function is None:
            self.problems.add(path, f"engine {entry.engine!r} runs a function; add `function: NAME`")
            return None
        try:
            return engine.signature(entry.function, entry.options)
        except StagemeshError as exc:
            option = exc.metadata.get("option")
            at = ("options", option) if option in entry.options else ("function" if entry.function else "options",)
            if not self.problems.has((*path, *at)):
                self.problems.add((*path, *at), exc.message)
            return None

    def _check_options(self, path: KeyPath, entry: StageEntry, engine: EngineDescriptor) -> None:
        for option in entry.options:
            if engine.stage_options is not None and option not in engine.stage_options:
                remedy = suggest(option, engine.stage_options)
                self.problems.add(
                    (*path, "options", option), f"engine {entry.engine!r} has no option {option!r}; {remedy}"
                )

    def _find_model(self, path: KeyPath, entry: StageEntry, engine: EngineDescriptor) -> Path | None:
        if entry.model is None:
            if engine.needs_model:
                self.problems.add(path, f"engine {entry.engine!r} needs a model; add `model: NAME or PATH`")
            return None
        if not self.check_models:
            return None
        found = settings.find_model(entry.model)
        if found is None:
            searched = " and ".join(str(place) for place in (Path(entry.model), settings.models_dir() / entry.model))
            self.problems.add(
                (*path, "model"), f"model {entry.model!r} is missing (searched {searched}); {self.fetch_hint}"
            )
        return found
