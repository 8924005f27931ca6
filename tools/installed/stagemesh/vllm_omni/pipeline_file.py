"""Converts a vLLM-Omni config to a pipeline file, and checks the result as `stagemesh pipeline validate` does."""

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import JsonValue

from stagemesh.common.errors import InvalidPipelineError, InvalidRequestError
from stagemesh.pipeline import load_pipeline
from stagemesh.vllm_omni.graph import convert_edges, take_arcs, take_outputs
from stagemesh.vllm_omni.keys import PIPELINE_WIDE, TOP_NOTES, Outcome, Report, report_rest
from stagemesh.vllm_omni.known_models import (
    DIFFUSION_CHECKPOINTS,
    DIFFUSION_TOPOLOGY,
    TOPOLOGIES,
    Family,
    Kind,
    find_family,
)
from stagemesh.vllm_omni.source import OmniConfig, Section, read_config
from stagemesh.vllm_omni.stages import OmniStage, classify, convert_stage, stage_name

_VARIABLE = "STAGEMESH_MODEL"
_PROMPT_STAGE = "prompt"
_UNKNOWN = "the import does not know this key; see docs/migration.md for those that it converts"


class _Dumper(yaml.SafeDumper):
    """Writes equal values in full instead of as aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  # the parameter of the base class
        return True


@dataclass
class Imported:
    """The result of an import. `pipeline` is the content of the pipeline file, or None if something is missing."""

    pipeline: dict[str, JsonValue] | None = None
    report: Report = field(default_factory=Report)

    def dump(self) -> str:
        """Returns the pipeline file as YAML, or "" if there is none."""
        if self.pipeline is None:
            return ""
        text = yaml.dump(
            self.pipeline, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None
        )
        return re.sub(r"\n(?=\w)", "\n\n", text)


def import_config(file: Path, *, model: str | None, name: str | None, topology: str | None) -> Imported:
    """Converts the config in `file`.

    - `model` is the model of all stages, or None for a variable with the usual checkpoint as its default.
    - `name` is the name of the pipeline, or None for the name of the file.
    - `topology` is the graph of stages of a deploy config, or None if the file names it.

    Raises InvalidRequestError (INVALID_CONFIG) if the file is not a valid config of vLLM-Omni.
    """
    config, imported = read_config(file), Imported()
    report = imported.report
    arcs_of, stages = _classify_stages(config, topology, report)
    if not stages:
        return imported
    arcs = take_arcs(config, arcs_of)
    _name_stages(stages)
    _spread(config, stages)
    edges = convert_edges(config, arcs, stages, report)
    outputs = take_outputs(stages, is_deploy=config.is_deploy)
    if not outputs:
        text = "no stage has a final output; set `final_output: true` and `final_output_type` of a stage"
        report.add(Outcome.MISSING, "final_output", text)
    if model is not None:
        _replace_models(stages, report)
    checkpoint = model or _checkpoint(stages, report)
    senders = {producer for producer, _ in arcs}
    entries: dict[str, JsonValue] = {
        stage.name: convert_stage(stage, model=checkpoint, sends=stage_id in senders, report=report)
        for stage_id, stage in stages.items()
    }
    _add_prompt_stage(stages, entries, edges, model=checkpoint)
    report_rest(config.top, TOP_NOTES, report, unknown=_UNKNOWN)
    pipeline: dict[str, JsonValue] = {"pipeline": _pipeline_name(name or file.stem)}
    samplers = [stage.name for stage in stages.values() if stage.kind is Kind.AR]
    if len(samplers) > 1:
        pipeline["main_stage"] = samplers[0]
    pipeline["stages"] = entries
    if edges:
        pipeline["edges"] = [*edges]
    pipeline["outputs"] = outputs
    if not report.items(Outcome.MISSING):
        imported.pipeline = pipeline
        _check(imported)
    return imported


def _classify_stages(
    config: OmniConfig, topology: str | None, report: Report
) -> tuple[Mapping[int, tuple[int, ...]], dict[int, OmniStage]]:
    """Returns the producers of each stage as far as vLLM-Omni's own definition of the model has them, and the stages.

    There are no stages if the graph of a deploy config is unknown.
    """
    sections = sorted(config.stages.items())
    if not config.is_deploy:
        if topology is not None:
            raise InvalidRequestError(
                "--topology is for deploy configs, but the stages of this file name their inputs; omit it",
                reason="INVALID_CONFIG",
            )
        architectures = [given for _, section in sections if (given := section.values.get("model_arch"))]
        family = next(filter(None, (find_family(str(each.value)) for each in architectures)), None)
        return {}, {stage_id: classify(section, family=family) for stage_id, section in sections}
    path, named = config.top.where("pipeline").lstrip("."), config.top.take("pipeline", str)
    if topology is not None and named is not None:
        report.add(Outcome.NOT_NEEDED, path, "--topology replaces it")
    name = topology or named or _usual_topology(config)
    if name == DIFFUSION_TOPOLOGY:
        return {}, {stage_id: classify(section, kind=Kind.DIFFUSION) for stage_id, section in sections}
    if name not in TOPOLOGIES:
        known = ", ".join((*TOPOLOGIES, DIFFUSION_TOPOLOGY))
        problem = f"the graph of stages {name!r} is unknown" if name else "the file does not name its graph of stages"
        text = f"{problem}; set --topology to one of {known}, or write the pipeline file by hand"
        report.add(Outcome.MISSING, path, text)
        return {}, {}
    family, roles = TOPOLOGIES[name]
    extra = [section for stage_id, section in sections if stage_id >= len(roles)]
    for section in extra:
        text = f"the graph {name} has only the stages 0 to {len(roles) - 1}; set --topology to another one"
        report.add(Outcome.MISSING, section.path, text)
    if extra:
        return {}, {}
    return _fill_in(config, family, roles)


def _fill_in(
    config: OmniConfig, family: Family, roles: tuple[str, ...]
) -> tuple[Mapping[int, tuple[int, ...]], dict[int, OmniStage]]:
    """Returns the producers and the stages of a known graph. Adds the stages that a deploy config omits."""
    for stage_id, role in enumerate(roles):
        config.stages.setdefault(stage_id, Section(f"stages ({role})"))
    stages = {
        stage_id: classify(config.stages[stage_id], family=family, model_stage=role)
        for stage_id, role in enumerate(roles)
    }
    producers = {
        stage_id: tuple(roles.index(each) for each in family.roles[role].inputs) for stage_id, role in enumerate(roles)
    }
    return producers, stages


def _usual_topology(config: OmniConfig) -> str:
    """Returns the graph that the name of the file says, as do the names of vLLM-Omni's own deploy configs."""
    if config.file.stem in TOPOLOGIES:
        return config.file.stem
    is_diffusion = any("model_class_name" in section.values for section in config.stages.values())
    return DIFFUSION_TOPOLOGY if is_diffusion else ""


def _name_stages(stages: Mapping[int, OmniStage]) -> None:
    taken = set[str]()
    for stage_id, stage in stages.items():
        name = stage_name(stage, stage_id)
        stage.name = f"{name}-{stage_id}" if name in taken else name
        taken.add(stage.name)


def _spread(config: OmniConfig, stages: Mapping[int, OmniStage]) -> None:
    """Moves the keys that apply to every stage to the stages that do not set them.

    Function stages get only the keys that would change what they compute.
    """
    if not config.is_deploy:
        return
    for name in PIPELINE_WIDE:
        given = config.top.values.pop(name, None)
        for stage in stages.values():
            if given is not None and (stage.kind is not Kind.GENERATION or name in {"dtype", "quantization"}):
                stage.section.values.setdefault(name, given)


def _replace_models(stages: Mapping[int, OmniStage], report: Report) -> None:
    for stage in stages.values():
        given = stage.section.values.pop("model", None)
        if given is not None:
            report.add(Outcome.NOT_NEEDED, given.path, "--model replaces it")


def _checkpoint(stages: Mapping[int, OmniStage], report: Report) -> str:
    """Returns a reference to a variable that names the model, with the usual checkpoint as its default."""
    if all("model" in stage.section.values for stage in stages.values()):
        return ""
    for stage in stages.values():
        given = stage.section.values.get("model_class_name")
        usual = DIFFUSION_CHECKPOINTS.get(str(given.value)) if given is not None else None
        checkpoint = stage.family.checkpoint if stage.family is not None else usual
        if checkpoint is not None:
            return f"${{{_VARIABLE}:-{checkpoint}}}"
    report.add(Outcome.MISSING, "model", "the file does not name the model, as vLLM-Omni's do not; set --model")
    return ""


def _add_prompt_stage(
    stages: Mapping[int, OmniStage], entries: dict[str, JsonValue], edges: list[dict[str, JsonValue]], *, model: str
) -> None:
    """Adds the stage that computes the input of a model whose first stage reads no text itself."""
    family = next((stage.family for stage in stages.values() if stage.family is not None), None)
    if family is None or not family.prompt_function:
        return
    prompt: JsonValue = {"engine": "function", "function": family.prompt_function, "model": model}
    others = {**entries}
    entries.clear()
    entries[_PROMPT_STAGE] = prompt
    entries |= others
    edges[:0] = [{"from": _PROMPT_STAGE, "to": name} for name in others]


def _check(imported: Imported) -> None:
    """Checks the pipeline file. Reports its mistakes, and removes the file if it has any."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pipeline.yaml"
        path.write_text(imported.dump(), encoding="utf-8")
        try:
            load_pipeline(str(path), variables={}, check_models=False)
        except InvalidPipelineError as exc:
            for finding in exc.findings:
                key = finding.key or "the file"
                imported.report.add(Outcome.MISSING, f"pipeline file: {key}", finding.message)
            imported.pipeline = None


def _pipeline_name(text: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name[:1].isalpha():
        raise InvalidRequestError(
            f"{text!r} cannot be the name of a pipeline, which begins with a letter; set --name",
            reason="INVALID_CONFIG",
        )
    return name[:63]
