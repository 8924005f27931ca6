"""Resolves stages against the installed engines and models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

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
from stagemesh.orchestrator.spec.schema import PipelineShape, StageShape
from stagemesh.orchestrator.spec.source.origins import KeyPath


@dataclass(frozen=True)
class Catalog:
    """Where cards come from; raises NotFoundError for unknown names."""

    engine: Callable[[str], EngineDescriptor] = load_engine_descriptor
    transform: Callable[[str], TransformDescriptor] = load_transform_descriptor


@dataclass(frozen=True)
class StageResolver:
    """Turns the file's stages into checked ones; what is wrong goes to `problems`."""

    catalog: Catalog
    problems: Problems
    check_models: bool
    fetch_hint: str
    """The remedy for a missing model."""

    def resolve(self, shape: PipelineShape) -> Mapping[str, Stage]:
        """The stages that hold together."""
        stages = {name: self._stage(name, stage) for name, stage in shape.stages.items()}
        return {name: stage for name, stage in stages.items() if stage is not None}

    def _stage(self, name: str, shape: StageShape) -> Stage | None:
        path: KeyPath = ("stages", name)
        try:
            card = self.catalog.engine(shape.engine)
        except StagemeshError as exc:
            self.problems.add((*path, "engine"), exc.message)
            return None
        self._check_options(path, shape, card)
        signature = self._signature(path, shape, card)
        if signature is None:
            return None
        return Stage(
            name=name,
            engine=shape.engine,
            model=self._find_model(path, shape, card),
            model_name=shape.model or "",
            function=shape.function,
            replicas=shape.replicas,
            options=shape.options,
            data_plane=shape.data_plane.config,
            stall_s=shape.stall_s,
            signature=signature,
        )

    def _signature(self, path: KeyPath, shape: StageShape, card: EngineDescriptor) -> Signature | None:
        if card.needs_function and shape.function is None:
            self.problems.add(path, f"engine {shape.engine!r} runs a function; add `function: NAME`")
            return None
        try:
            return card.signature(shape.function, shape.options)
        except StagemeshError as exc:
            option = exc.metadata.get("option")
            at = ("options", option) if option in shape.options else ("function" if shape.function else "options",)
            if not self.problems.has((*path, *at)):
                self.problems.add((*path, *at), exc.message)
            return None

    def _check_options(self, path: KeyPath, shape: StageShape, card: EngineDescriptor) -> None:
        for option in shape.options:
            if card.stage_options is not None and option not in card.stage_options:
                remedy = suggest(option, card.stage_options)
                self.problems.add(
                    (*path, "options", option), f"engine {shape.engine!r} has no option {option!r}; {remedy}"
                )

    def _find_model(self, path: KeyPath, shape: StageShape, card: EngineDescriptor) -> Path | None:
        if shape.model is None:
            if card.needs_model:
                self.problems.add(path, f"engine {shape.engine!r} needs a model; add `model: NAME or PATH`")
            return None
        if not self.check_models:
            return None
        found = settings.find_model(shape.model)
        if found is None:
            looked = " and ".join(str(place) for place in (Path(shape.model), settings.models_dir() / shape.model))
            self.problems.add(
                (*path, "model"), f"model {shape.model!r} is missing (looked for {looked}); {self.fetch_hint}"
            )
        return found
