"""Checks the classes of models, and the code that stages and edges name, which it imports."""

from collections.abc import Mapping, Sequence

from stagemesh.common.descriptors import factory_problem
from stagemesh.common.errors import StagemeshError
from stagemesh.orchestrator.spec.checks.stages_and_outputs import Catalog
from stagemesh.orchestrator.spec.model import Stage
from stagemesh.orchestrator.spec.schema import PipelineFile
from stagemesh.orchestrator.spec.source.problem_lines import KeyPath, Problems

_ENGINE, _FUNCTION, _TRANSFORM = ("start", "submit"), ("open", "__call__"), ("push", "finish")
"""The methods of an engine, of a function and of a transform."""


def check_factories_and_models(
    file: PipelineFile, stages: Mapping[str, Stage], catalog: Catalog, problems: Problems
) -> None:
    """Imports the factories of engines, functions and transforms, and looks up the classes of models.

    `stages` are the stages with a valid signature. Reports errors to `problems`. Omits descriptors that cannot be
    loaded, because they are reported elsewhere.
    """
    for stage in stages.values():
        if not stage.is_external:
            _check_stage(stage, catalog, problems)
    for index, edge in enumerate(file.edges):
        if edge.transform is not None:
            try:
                factory = catalog.transform(edge.transform).factory
            except StagemeshError:
                continue
            what = f"transform {edge.transform!r}"
            _check_factory(("edges", index, "transform"), what, factory, _TRANSFORM, problems)


def _check_stage(stage: Stage, catalog: Catalog, problems: Problems) -> None:
    path: KeyPath = ("stages", stage.name)
    engine = catalog.engine(stage.engine)
    _check_factory((*path, "engine"), f"engine {stage.engine!r}", engine.factory, _ENGINE, problems)
    if stage.function is not None and engine.needs_function:
        try:
            factory = catalog.function(stage.function).factory
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
