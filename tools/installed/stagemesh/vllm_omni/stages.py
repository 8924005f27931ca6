"""Converts the stages of a vLLM-Omni config to stages of a pipeline file."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pydantic import JsonValue

from stagemesh.vllm_omni.keys import (
    CODEC_NOTES,
    DIFFUSION_NOTES,
    DIFFUSION_SAMPLING,
    FUNCTION_NOTES,
    PARALLEL,
    SAMPLING,
    STEP_CACHE,
    VLLM_ARGUMENTS,
    VLLM_NOTES,
    Outcome,
    Report,
    report_rest,
)
from stagemesh.vllm_omni.known_models import DIFFUSION_CHECKPOINTS, PARTS, Family, Kind, Role
from stagemesh.vllm_omni.source import Section

_CACHE_DIT, _MAX_SIDE, _MAX_STEPS = "cache_dit", 2048, 200
"""The name of a step cache, and the defaults of the limits `max_side` and `max_inference_steps`."""
_UNKNOWN = (
    "the import does not know this key; if it is an option of the {engine} engine, add it to `stages.{name}.options`"
)
_WORKERS: tuple[tuple[str, Kind], ...] = (
    ("generation", Kind.GENERATION),
    ("diffusion", Kind.DIFFUSION),
    ("ar", Kind.AR),
)
"""Parts of the names of workers and schedulers, in the order in which they are looked for."""


@dataclass
class OmniStage:
    """A stage of the config, and the facts that decide how it is converted."""

    section: Section
    model_stage: str
    kind: Kind
    family: Family | None
    name: str = ""
    """The stage's name in the pipeline file."""

    @property
    def role(self) -> Role | None:
        """The stage's role in a known model, or None if the model or the role is unknown."""
        return self.family.roles.get(self.model_stage) if self.family is not None else None


def classify(
    section: Section, *, family: Family | None = None, model_stage: str = "", kind: Kind | None = None
) -> OmniStage:
    """Returns a stage with its kind, and takes the keys that decide it.

    - `family` is the known model of the config, or None if the model is unknown.
    - `model_stage` is the stage's name in vLLM-Omni's definition of the model if the config does not contain it.
    - `kind` is the stage's kind if the config does not contain it.
    """
    stage = OmniStage(section, section.take("model_stage", str) or model_stage, Kind.AR, family)
    stage.kind = _take_kind(section) or kind or (stage.role.kind if stage.role is not None else Kind.AR)
    if stage.role is not None and stage.role.kind is not stage.kind:
        # For example a single stage that computes a whole TTS model.
        stage.family = None
    if stage.role is not None:
        section.take("model_arch", str)
    return stage


def _take_kind(section: Section) -> Kind | None:
    """Returns the kind that a stage's keys say, or None if they do not say it."""
    stage_type, worker_type = section.take("stage_type", str), section.take("worker_type", str)
    if stage_type == "diffusion" or "model_class_name" in section.values:
        return Kind.DIFFUSION
    classes = [section.values[name].value for name in ("worker_cls", "scheduler_cls") if name in section.values]
    for text in (worker_type or "", *map(str, classes)):
        name = text.rpartition(".")[2].lower()
        for part, kind in _WORKERS:
            if part in name:
                return kind
    return None


def convert_stage(stage: OmniStage, *, model: str, sends: bool, report: Report) -> dict[str, JsonValue]:
    """Returns the stage's entry in the pipeline file. Reports the keys that are not converted.

    `sends` is True if another stage consumes the stage's tensors.
    """
    section, role = stage.section, stage.role
    _drop_own_classes(section, report)
    replicas = section.take("num_replicas", int) or 1
    entry: dict[str, JsonValue] = {"engine": "vllm", "model": section.take("model", str) or model}
    match stage.kind:
        case Kind.AR:
            options = _vllm_options(stage, replicas=replicas, sends=sends, report=report)
        case Kind.DIFFUSION:
            entry["engine"] = "diffusion"
            options = _diffusion_options(stage, report)
        case Kind.GENERATION:
            options = _function_options(stage, report)
            function = role.function if role is not None else ""
            if not function:
                report.add(
                    Outcome.MISSING,
                    section.path,
                    f"no function of Stagemesh does the work of stage {stage.model_stage or stage.name!r}; write one "
                    "(docs/own-stage.md)",
                )
            entry = {"engine": "function", "function": function, "model": entry["model"]}
    if replicas > 1:
        entry["replicas"] = replicas
    if role is not None and role.join:
        entry["join"] = role.join
    if options:
        entry["options"] = options
    if role is not None and role.arena_bytes and sends:
        entry["data_plane"] = {"arena_bytes": role.arena_bytes}
    return entry


def _drop_own_classes(section: Section, report: Report) -> None:
    for name in ("worker_cls", "scheduler_cls"):
        if name not in section.values:
            continue
        path, given = section.where(name), section.take(name, str) or ""
        if given.startswith("vllm_omni."):
            report.add(Outcome.NOT_NEEDED, path, "Stagemesh's engines have workers of their own, and vLLM's scheduler")
        else:
            text = f"the class {given} cannot replace those of Stagemesh's engines; write an engine (CONTRIBUTING.md)"
            report.add(Outcome.NOT_CARRIED, path, text)


def _vllm_options(stage: OmniStage, *, replicas: int, sends: bool, report: Report) -> dict[str, JsonValue]:
    section, role = stage.section, stage.role
    options: dict[str, JsonValue] = {}
    is_codec = role is not None and "codec" in role.options
    notes = {**VLLM_NOTES, **CODEC_NOTES} if is_codec else VLLM_NOTES
    if is_codec and "pipeline_parallel_size" in section.values and section.values["pipeline_parallel_size"].value == 1:
        section.take("pipeline_parallel_size", int)
    _take_batch_size(section, "max_num_seqs", report)
    for name in [name for name in section.values if name in VLLM_ARGUMENTS and not (is_codec and name in CODEC_NOTES)]:
        options[name] = section.values.pop(name).value
    sampling = _take_each(section, "default_sampling_params", SAMPLING)
    if sampling:
        given = options.get("override_generation_config")
        options["override_generation_config"] = {**(given if isinstance(given, dict) else {}), **sampling}
    _take_devices(section, options, replicas=replicas, report=report)
    for mark in ("is_prefill_only", "is_decode_only"):
        if section.values.get(mark) and section.take(mark, bool):
            text = (
                "the pipeline would have two stages for one model; import a config with one stage for it, and set "
                "`split` of this stage, which is possible if no other stage consumes its hidden states (docs/vllm.md)"
            )
            report.add(Outcome.MISSING, f"{section.path}.{mark}", text)
    if role is not None:
        for name, value in {**role.options, **(role.sends_states if sends else {})}.items():
            options.setdefault(name, value)
    report_rest(section, notes, report, unknown=_UNKNOWN.format(engine="vllm", name=stage.name))
    return options


def _take_batch_size(section: Section, option: str, report: Report) -> None:
    """Renames `max_batch_size` to `option`, unless the section has `option`, too."""
    given = section.values.pop("max_batch_size", None)
    if given is None:
        return
    if option in section.values:
        report.add(Outcome.NOT_NEEDED, given.path, f"{section.where(option)} replaces it")
    else:
        section.values[option] = given


def _take_devices(section: Section, options: dict[str, JsonValue], *, replicas: int, report: Report) -> None:
    given = section.values.pop("devices", None)
    if given is None:
        return
    devices = [part.strip() for part in str(given.value).strip("[]").split(",")]
    if not all(part.isdecimal() for part in devices):
        text = f"{str(given.value)!r} is not a list of numbers; set `device_ids` of the stage's options"
        report.add(Outcome.NOT_CARRIED, given.path, text)
    elif replicas > 1:
        text = (
            "each replica needs devices of its own; set CUDA_VISIBLE_DEVICES where each replica is started (`stagemesh "
            "serve stage`), or `gpus` in the values of the Helm chart"
        )
        report.add(Outcome.NOT_CARRIED, given.path, text)
    else:
        options["device_ids"] = [int(part) for part in devices]


def _function_options(stage: OmniStage, report: Report) -> dict[str, JsonValue]:
    _take_batch_size(stage.section, "max_num_seqs", report)
    max_batch = stage.section.take("max_num_seqs", int)
    report_rest(stage.section, FUNCTION_NOTES, report, unknown=_UNKNOWN.format(engine="function", name=stage.name))
    return {"max_batch": max_batch} if max_batch else {}


def _diffusion_options(stage: OmniStage, report: Report) -> dict[str, JsonValue]:
    section = stage.section
    options: dict[str, JsonValue] = {"part": stage.model_stage} if stage.model_stage in PARTS else {}
    _check_class(stage, report)
    for name in ("dtype", "enable_lora", "max_loras", "max_lora_rank"):
        if name in section.values:
            options[name] = section.values.pop(name).value
    _take_batch_size(section, "max_num_seqs", report)
    if max_batch := section.take("max_num_seqs", int):
        options["max_batch"] = max_batch
    load = _load_options(section)
    if load:
        options["load"] = load
    parallel = _parallel_options(section, report)
    if parallel:
        options["parallel"] = parallel
    _take_step_cache(section, options, report)
    _take_request_defaults(section, options, report)
    report_rest(section, DIFFUSION_NOTES, report, unknown=_UNKNOWN.format(engine="diffusion", name=stage.name))
    return options


def _is_of_diffusers(name: str) -> bool:
    """Returns whether diffusers has a class of this name. Reads its list of classes, because its import takes seconds.

    If diffusers is not installed, only some classes are known.
    """
    installed = find_spec("diffusers")
    listed = Path(installed.origin).read_text(encoding="utf-8") if installed and installed.origin else ""
    return name in DIFFUSION_CHECKPOINTS or f'"{name}"' in listed


def _check_class(stage: OmniStage, report: Report) -> None:
    given = stage.section.values.get("model_class_name")
    if given is not None and not _is_of_diffusers(str(given.value)):
        text = f"the diffusion engine does not run {given.value}; it runs the pipelines of diffusers"
        report.add(Outcome.MISSING, given.path, f"{text} (docs/diffusion-models.md lists them)")
    if "omni_kv_config" in stage.section.values:
        text = (
            "the stage would continue the KV cache of a language model, which no diffusion stage accepts; choose a "
            "model whose stages exchange tensors, or add a stage for it (docs/own-stage.md)"
        )
        report.add(Outcome.MISSING, stage.section.where("omni_kv_config"), text)


def _load_options(section: Section) -> dict[str, JsonValue]:
    load: dict[str, JsonValue] = {}
    if section.take("enable_layerwise_offload", bool):
        load["offload"] = "group"
    if section.take("enable_cpu_offload", bool):
        load.setdefault("offload", "model")
    if section.take("enforce_eager", bool) is False:
        load["compile"] = True
    return load


def _parallel_options(section: Section, report: Report) -> dict[str, JsonValue]:
    for name in ("use_hsdp", *PARALLEL):
        nested = section.values.pop(f"parallel_config.{name}", None)
        if nested is not None and name in section.values:
            report.add(Outcome.NOT_NEEDED, nested.path, f"{section.where(name)} replaces it")
        elif nested is not None:
            section.values[name] = nested
    path, uses_hsdp = section.where("use_hsdp"), section.take("use_hsdp", bool)
    degrees = {option: section.take(name, int) or 1 for name, option in PARALLEL.items()}
    if uses_hsdp is False:
        degrees.pop("hsdp")
    elif uses_hsdp and degrees["hsdp"] <= 1:
        text = "the number of shards is not given; set `parallel.hsdp` of the stage to it"
        report.add(Outcome.NOT_CARRIED, path, text)
    return {option: degree for option, degree in degrees.items() if degree > 1}


def _take_step_cache(section: Section, options: dict[str, JsonValue], report: Report) -> None:
    path, backend = section.where("cache_backend"), section.take("cache_backend", str)
    if backend == _CACHE_DIT:
        options["step_cache"] = {"kind": _CACHE_DIT, **_take_each(section, "cache_config", STEP_CACHE)}
    elif backend is not None and backend != "none":
        text = f"the engine has no step cache {backend}; set `step_cache` to another one (docs/diffusion-tuning.md)"
        report.add(Outcome.NOT_CARRIED, path, text)


def _take_request_defaults(section: Section, options: dict[str, JsonValue], report: Report) -> None:
    """Takes the defaults of the options that a request may set, and raises the limits that they exceed."""
    names = {name: name for name in DIFFUSION_SAMPLING}
    unused = dict[str, str]()
    if "default_sampling_params.true_cfg_scale" in section.values:
        unused["guidance_scale"] = "the stage's `guidance_scale` is the scale of true guidance, here true_cfg_scale"
        names = {**names, "true_cfg_scale": "guidance_scale"}
    if "part" in options:
        used = {"encode": ("guidance_scale", "true_cfg_scale"), "decode": ()}.get(str(options["part"]), (*names,))
        unused |= dict.fromkeys(names.keys() - {*used}, "the option belongs to the stages that use it")
    if (count := section.values.get("default_sampling_params.num_outputs_per_prompt")) and count.value == 1:
        unused["num_outputs_per_prompt"] = "a request has one choice unless it asks for more"
    for name, text in sorted(unused.items()):
        given = section.values.pop(f"default_sampling_params.{name}", None)
        if given is not None:
            report.add(Outcome.NOT_NEEDED, given.path, text)
    options |= _take_each(section, "default_sampling_params", names)
    for limit, sides, usual in (
        ("max_side", ("height", "width"), _MAX_SIDE),
        ("max_frames", ("num_frames",), 1),
        ("max_inference_steps", ("num_inference_steps",), _MAX_STEPS),
    ):
        largest = max((value for name in sides if isinstance(value := options.get(name), int)), default=0)
        if largest > usual:
            options[limit] = largest


def _take_each(section: Section, prefix: str, names: Mapping[str, str]) -> dict[str, JsonValue]:
    """Takes the values of a mapping that have an entry in `names`. Returns them by the names that `names` maps to."""
    below = section.below(prefix)
    return {new: section.values.pop(f"{prefix}.{old}").value for old, new in names.items() if old in below}


def stage_name(stage: OmniStage, stage_id: int) -> str:
    """Returns a name for a stage that consists of the characters that a pipeline file allows."""
    if stage.role is not None:
        return stage.role.name
    name = re.sub(r"[^a-z0-9]+", "-", stage.model_stage.lower()).strip("-")
    return name if name[:1].isalpha() else f"stage-{stage_id}"
