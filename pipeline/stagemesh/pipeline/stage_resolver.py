"""Resolves the stages and outputs of a pipeline file, and checks the code that they name."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagemesh.common.errors import StagemeshError
from stagemesh.common.media.encodings import VIDEO_ENCODINGS, encodings_of
from stagemesh.common.plugins.descriptors import (
    Emitted,
    EngineDescriptor,
    FunctionDescriptor,
    Signature,
    TransformDescriptor,
)
from stagemesh.common.plugins.entry_points import factory_problem, load_descriptor
from stagemesh.common.process import settings
from stagemesh.pipeline.document import KeyPath, Problems, dotted, suggest
from stagemesh.pipeline.graph import Edge, PipelineOutput, Stage, ancestors
from stagemesh.pipeline.schema import ExternalStageEntry, OutputEntry, PipelineFile, StageEntry


@dataclass(frozen=True)
class StageResolver:
    """Converts the stages of a pipeline file to checked stages. Does not resolve the stages' conditions.

    Reports errors to `problems`. Looks up only the models of the stages in `check_models`, and a missing model of
    another stage is not an error.
    """

    problems: Problems
    check_models: Collection[str]
    fetch_hint: str
    """The remedy in the error message for a missing model. It tells the user how to obtain the model."""

    def resolve(self, file: PipelineFile) -> Mapping[str, Stage]:
        """Checks all stages. Returns the stages that have a valid engine and signature, by name."""
        stages = {
            name: _external_stage(name, entry) if isinstance(entry, ExternalStageEntry) else self._stage(name, entry)
            for name, entry in file.stages.items()
        }
        return {name: stage for name, stage in stages.items() if stage is not None}

    def _stage(self, name: str, entry: StageEntry) -> Stage | None:
        path: KeyPath = ("stages", name)
        try:
            engine = load_descriptor(EngineDescriptor, entry.engine)
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
        options = dict(entry.options)
        while True:
            try:
                return engine.signature(entry.function, options)
            except StagemeshError as exc:
                option = exc.metadata.get("option")
                at = ("options", option) if option in options else ("function" if entry.function else "options",)
                if not self.problems.has((*path, *at)):
                    self.problems.add((*path, *at), exc.message)
                if option not in options:
                    return None
                # The next round finds the next invalid option.
                del options[option]

    def _check_options(self, path: KeyPath, entry: StageEntry, engine: EngineDescriptor) -> None:
        for option in entry.options:
            if engine.stage_options is not None and option not in engine.stage_options:
                remedy = suggest(option, engine.stage_options)
                text = f"engine {entry.engine!r} has no option {option!r}; {remedy}"
                self.problems.add((*path, "options", option), text)

    def _find_model(self, path: KeyPath, entry: StageEntry, engine: EngineDescriptor) -> Path | None:
        if entry.model is None:
            if engine.needs_model:
                self.problems.add(path, f"engine {entry.engine!r} needs a model; add `model: NAME or PATH`")
            return None
        if path[-1] not in self.check_models:
            return None
        found = settings.find_model(entry.model)
        if found is None:
            searched = " and ".join(str(place) for place in (Path(entry.model), settings.models_dir() / entry.model))
            text = f"model {entry.model!r} is missing (searched {searched}); {self.fetch_hint}"
            self.problems.add((*path, "model"), text)
        return found


def _external_stage(name: str, entry: ExternalStageEntry) -> Stage:
    resolved: dict[str, Any] = {"name": name, "signature": entry.signature.signature}
    return Stage.model_construct(**{**dict(entry), **resolved})


@dataclass(frozen=True)
class OutputResolver:
    """Converts the outputs of a pipeline file to checked outputs. Reports errors to `problems`."""

    stages: Mapping[str, Stage]
    problems: Problems
    store_uri: str
    """The URI of the pipeline's object store, or empty if there is none."""

    def resolve(self, file: PipelineFile) -> Mapping[str, PipelineOutput]:
        """Checks all outputs. Returns the outputs for which both the stage and the tensor exist, by name."""
        outputs: dict[str, PipelineOutput] = {}
        for name, entry in file.outputs.items():
            if entry.stage not in file.stages:
                text = f"output {name!r} names an unknown stage {entry.stage!r}; {suggest(entry.stage, file.stages)}"
                self.problems.add(("outputs", name), text)
            elif stage := self.stages.get(entry.stage):
                self._add(outputs, name, entry, stage)
        return outputs

    def _add(self, outputs: dict[str, PipelineOutput], name: str, entry: OutputEntry, stage: Stage) -> None:
        emits, tensor = stage.signature.emits, entry.tensor
        chosen = tensor or (name if name in emits else next(iter(emits)) if len(emits) == 1 else "")
        same = next((each for each in outputs.values() if (each.stage, each.tensor) == (stage.name, chosen)), None)
        if not chosen:
            text = f"stage {stage.name!r} emits {', '.join(emits) or 'nothing'}; choose one as {stage.name}.TENSOR"
        elif chosen not in emits:
            text = f"stage {stage.name!r} does not emit {chosen!r}; {suggest(chosen, emits)}"
        elif emits[chosen].spec.ticket_kind:
            text = f"{stage.name}.{chosen} is a ticket for another stage's engine, which no client can read; remove it"
        elif same is not None:
            text = f"{stage.name}.{chosen} is already the output {same.name!r}; keep one of them"
        else:
            emitted = emits[chosen]
            self._check_file(("outputs", name), entry, emitted)
            written: dict[str, Any] = {**dict(entry), "source": f"{stage.name}.{chosen}"}
            outputs[name] = PipelineOutput(
                **written,
                name=name,
                kind=emitted.kind,
                sample_rate_hz=emitted.sample_rate_hz,
                emitted_type=emitted.media_type,
                folder_uri=f"{self.store_uri}/outputs" if entry.stored else "",
            )
            return
        self.problems.add(("outputs", name), text)

    def _check_file(self, path: KeyPath, entry: OutputEntry, emitted: Emitted) -> None:
        """Reports an error for each key that does not fit to the tensor that the stage emits."""
        encodings = encodings_of(emitted)
        is_video = entry.media_type in VIDEO_ENCODINGS
        if entry.media_type is not None and entry.media_type not in encodings:
            listed = ", ".join(encodings)
            remedy = f"use one of {listed}" if listed else "remove media_type, because the stage emits whole files"
            text = f"{entry.source} ({emitted.kind}, {emitted.spec}) cannot be encoded as {entry.media_type!r}"
            self.problems.add((*path, "media_type"), f"{text}; {remedy}")
        elif is_video and entry.frame_rate is None:
            self.problems.add(path, f"{dotted(path)} is a video without a frame rate; add `frame_rate: 24`")
        elif entry.frame_rate is not None and not is_video:
            text = f"frame_rate is given for {entry.media_type or emitted.kind}; remove it, or use a video's media_type"
            self.problems.add((*path, "frame_rate"), text)
        if entry.stored and not self.store_uri:
            remedy = "add `media: {store: FOLDER OR URL}`"
            text = f"the output is to be stored, but the pipeline has no object store; {remedy}"
            self.problems.add((*path, "stored"), text)
        if entry.stored and entry.media_type is None and encodings:
            text = f"{dotted(path)} is stored without a media type; add `media_type: {encodings[0]}`"
            self.problems.add(path, text)


def check_all_used(file: PipelineFile, edges: Sequence[Edge], problems: Problems) -> None:
    """Reports an error for each stage on which no output depends, unless the stage detects turns.

    Does nothing if an output or an edge names an unknown stage, because that error is reported elsewhere.
    """
    targets = {entry.stage for entry in file.outputs.values()}
    if file.sessions.turn_detection is not None:
        targets.add(file.sessions.turn_detection)
    if len(edges) < len(file.edges) or not file.stages.keys() >= targets:
        return
    used = ancestors(targets, {edge.arc for edge in edges})
    for name in file.stages:
        if name not in used:
            text = f"no output depends on stage {name!r}; name it in `outputs`, add an edge, or remove it"
            problems.add(("stages", name), text)


_ENGINE, _FUNCTION, _TRANSFORM = ("start", "submit"), ("open", "__call__"), ("push", "finish")
"""The methods of an engine, of a function and of a transform."""


def check_factories_and_models(file: PipelineFile, stages: Mapping[str, Stage], problems: Problems) -> None:
    """Imports the factories of engines, functions and transforms, and looks up the classes of models.

    `stages` are the stages with a valid signature. Reports errors to `problems`. Omits descriptors that cannot be
    loaded, because they are reported elsewhere.
    """
    for stage in stages.values():
        if not stage.is_external:
            _check_stage(stage, problems)
    for index, edge in enumerate(file.edges):
        if edge.transform is not None:
            try:
                factory = load_descriptor(TransformDescriptor, edge.transform).factory
            except StagemeshError:
                continue
            what = f"transform {edge.transform!r}"
            _check_factory(("edges", index, "transform"), what, factory, _TRANSFORM, problems)


def _check_stage(stage: Stage, problems: Problems) -> None:
    path: KeyPath = ("stages", stage.name)
    engine = load_descriptor(EngineDescriptor, stage.engine)
    _check_factory((*path, "engine"), f"engine {stage.engine!r}", engine.factory, _ENGINE, problems)
    if stage.function is not None and engine.needs_function:
        try:
            factory = load_descriptor(FunctionDescriptor, stage.function).factory
        except StagemeshError:
            return
        _check_factory((*path, "function"), f"function {stage.function!r}", factory, _FUNCTION, problems)
    if engine.model_problem is None or stage.model_path is None:
        return
    if problem := engine.model_problem(stage.model_path, stage.options):
        problems.add((*path, "model"), problem)


def _check_factory(path: KeyPath, what: str, factory: str, methods: Sequence[str], problems: Problems) -> None:
    if problem := factory_problem(factory, methods=methods):
        problems.add(path, f"{what}: {problem}; install what it needs, or correct the package")
