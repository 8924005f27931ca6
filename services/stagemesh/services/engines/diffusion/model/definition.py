"""The modular pipeline that diffusers declares for a folder, and what its blocks do not use in the folder."""

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import diffusers as _diffusers

from stagemesh.common.errors import NotReadyError
from stagemesh.services.engines.diffusion.model.blocks import all_leaves, has_loop, modular_pipeline, pruned, sequence
from stagemesh.services.engines.diffusion.model.families import HINTS, Hints, read_index
from stagemesh.services.engines.torch_setup import UnusableOptionError

diffusers: Any = _diffusers
MAPPING: Mapping[str, Callable[..., str]] = modular_pipeline.MODULAR_PIPELINE_MAPPING
"""For the name of each modular model, the function that chooses its pipeline class from the folder's index."""

ENCODE, DENOISE, DECODE = "encode", "denoise", "decode"
_HARMLESS = ("safety_checker", "watermark")
"""The names of components that do not change what the model generates before they check or mark it."""
_WITHOUT_WEIGHTS = ("Tokenizer", "TokenizerFast", "Processor", "FeatureExtractor")
"""The ends of the names of classes without weights. Blocks that do not use them do the same work in another way."""
_PROMPT_TOOLS = ("prompt_", "pe_", "pe")
"""Prefixes of the names of components that improve prompts. Requests run without them."""
_MEDIA_INPUTS = frozenset({"image", "images", "video", "mask_image", "control_image", "control_video", "audio"})


@dataclass(frozen=True)
class Definition:
    """The modular pipeline for a folder."""

    name: str
    """The model's name in `MODULAR_PIPELINE_MAPPING`."""
    kind: Any
    """The class of the pipeline, a subclass of diffusers' `ModularPipeline`."""
    blocks: Any
    index: Mapping[str, Any]
    """The content of the folder's index file."""

    @property
    def hints(self) -> Hints:
        """The hints for this model, which may be empty."""
        return HINTS.get(self.name, Hints())

    @cached_property
    def phases(self) -> Mapping[str, str]:
        """For the name of each top-level block: ENCODE, DENOISE or DECODE. The block with the loop denoises, the blocks
        before it encode, and the blocks after it decode."""
        names = list(self.blocks.sub_blocks)
        loops = [i for i, name in enumerate(names) if has_loop(self.blocks.sub_blocks[name])]
        if not loops:
            raise NotReadyError(f"the blocks of {self.name} have no denoising loop", reason="UNSUPPORTED_MODEL")
        first, last = loops[0], loops[-1]
        return {name: ENCODE if i < first else DECODE if i > last else DENOISE for i, name in enumerate(names)}

    @cached_property
    def needed_blocks(self) -> Any:
        """The blocks that every request runs: those for the inputs that a request cannot omit."""
        return self.blocks.get_execution_blocks(**self._least_inputs())

    @cached_property
    def tags(self) -> Mapping[str, str]:
        """The tag of each output of the encoders that has one, by the output's name. Blocks of the loop may read all
        values with a tag (diffusers' `kwargs_type`)."""
        encoders = [block for name, block in self.blocks.sub_blocks.items() if self.phases[name] == ENCODE]
        outputs = (param for block in encoders for leaf in all_leaves(block) for param in leaf.intermediate_outputs)
        return {param.name: param.kwargs_type for param in outputs if param.kwargs_type}

    def inputs(self, phase: str) -> list[Any]:
        """Returns the declared inputs of a phase, as diffusers' `InputParam`."""
        return list(sequence(self.part(phase)[phase]).inputs)

    def part(self, part: str, names: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
        """Returns the top-level blocks that a stage runs by phase and by name.

        `part` is a phase or "all". An encoding stage excludes encoders of optional inputs, such as images, unless
        `names` names them. If `names` is not empty, the stage runs only the named blocks, which may be inside others.
        Raises NotReadyError if the part has none of them.
        """
        phases = [ENCODE, DENOISE, DECODE] if part == "all" else [part]
        own = {name: self.blocks.sub_blocks[name] for name, phase in self.phases.items() if phase in phases}
        needed = {name.partition(".")[0] for name in self.needed_blocks.sub_blocks}
        chosen: dict[str, Any] = {name: block for name, block in own.items() if part != ENCODE or name in needed}
        if names:
            chosen = {name: kept for name, block in own.items() if (kept := pruned(name, block, names)) is not None}
        if not chosen:
            raise UnusableOptionError(
                f"the part {part} of {self.name} has no block {', '.join(names)}; it has {', '.join(own)}"
            )
        return {
            phase: {name: block for name, block in chosen.items() if self.phases[name] == phase} for phase in phases
        }

    def _least_inputs(self) -> dict[str, Any]:
        """Returns the inputs of the simplest workflow, each with the value True."""
        workflow_map: dict[str, Any] = self.blocks._workflow_map or {}  # noqa: SLF001  # no public access
        # A tuple contains alternative inputs of one workflow.
        workflows: list[dict[str, Any]] = [
            cast("Any", each)[0] if isinstance(each, tuple) else each for each in workflow_map.values()
        ]
        required = {param.name: True for param in self.blocks.inputs if param.required and param.name}
        least = min(workflows, key=len) if workflows else {}
        return {"prompt": True, **required, **least}

    @property
    def needs_image(self) -> bool:
        """Whether the model cannot run without an input image."""
        return "image" in self._least_inputs()


def define(folder: Path) -> Definition:
    """Returns the modular pipeline for the model in `folder`, as diffusers' own mapping selects it.

    Raises NotReadyError if there is none, or if its blocks do not use something that the folder contains.
    """
    index = read_index(folder)
    definition = _define(folder, index)
    if problems := list(_problems(folder, definition)):
        raise NotReadyError(
            f"{folder} does not fit {definition.kind.__name__} of diffusers {diffusers.__version__}: "
            f"{'; '.join(problems)}",
            reason="UNSUPPORTED_MODEL",
        )
    return definition


def is_classic(folder: Path) -> bool:
    """Returns whether the pipeline in `folder` has no modular form that takes the same media and settings.

    Raises NotReadyError if the folder has no valid index.
    """
    index = read_index(folder)
    kind = getattr(diffusers, index["_class_name"], None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.DiffusionPipeline)):
        return False
    if _modular_name(kind.__name__) not in MAPPING:
        return True
    definition = _define(folder, index)
    return bool(_unused_media(definition) or _classic_parameters(index).keys() & _unused_settings(definition))


def _define(folder: Path, index: Mapping[str, Any]) -> Definition:
    class_name = index["_class_name"]
    kind: Any = getattr(diffusers, class_name, None)
    if not hasattr(kind, "from_pretrained"):
        raise _unsupported(folder, class_name, f"diffusers {diffusers.__version__} has no such class")
    name = None
    if not issubclass(kind, diffusers.ModularPipeline):
        name = _modular_name(class_name)
        if name is None or name not in MAPPING:
            raise _unsupported(folder, class_name, "diffusers has no modular pipeline for it")
        kind = getattr(diffusers, MAPPING[name](dict(index)))
    blocks_class = getattr(diffusers, index.get("_blocks_class_name") or "", None)
    if blocks_class is None or not blocks_class.block_classes:
        if kind.default_blocks_name is None:
            raise _unsupported(folder, class_name, "its blocks are code of the folder")
        blocks_class = getattr(diffusers, kind.default_blocks_name)
    blocks = blocks_class()
    return Definition(name or blocks.model_name, kind, blocks, index)


def _modular_name(class_name: str) -> str | None:
    """Returns the name in `MODULAR_PIPELINE_MAPPING` for a classic pipeline class, or None if there is none."""
    modular = class_name.removesuffix("Pipeline") + "ModularPipeline"
    name = next((name for name, choose in MAPPING.items() if choose() == modular), None)
    if name is not None:
        return name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Imports every classic pipeline, which takes seconds.
        auto_pipeline: Any = import_module("diffusers.pipelines.auto_pipeline")
    known: str | None = auto_pipeline._get_model(class_name)  # noqa: SLF001  # no public access
    return known


def _problems(folder: Path, definition: Definition) -> Iterator[str]:
    """Yields a description of everything in the folder's index that the blocks do not use or do not find."""
    blocks, index = definition.blocks, definition.index
    declared = _declared_kinds(blocks)
    for name in _unused_settings(definition):
        yield f"its blocks do not use the setting {name} ({index[name]!r})"
    for name, value in index.items():
        if _is_component(value) and value[0] is not None and name not in _HARMLESS:
            yield from _component_problems(folder, name, value, declared.get(name))
    for spec in definition.needed_blocks.expected_components:
        is_read = spec.default_creation_method == "from_pretrained"
        if is_read and spec.name not in index and not spec.name.startswith(_PROMPT_TOOLS):
            yield f"the folder has no component {spec.name}"
    if media := _unused_media(definition):
        yield f"its blocks do not take the input {', '.join(sorted(media))} of {index['_class_name']}"


def _unused_settings(definition: Definition) -> list[str]:
    """Returns the names of the settings in the index that the blocks do not use, unless the value is the default."""
    used = {spec.name for spec in definition.blocks.expected_configs}
    classic = _classic_parameters(definition.index)
    return [
        name
        for name, value in definition.index.items()
        if not (name.startswith("_") or name in used or value is None or _is_component(value))
        and value != classic.get(name)
        and not _selects(definition, name)
    ]


def _declared_kinds(blocks: Any) -> dict[str, list[Any]]:
    """Returns the classes that the blocks declare for each component. Blocks may declare different classes."""
    kinds: dict[str, list[Any]] = defaultdict(list)
    for leaf in all_leaves(blocks):
        for block in (leaf, *leaf.sub_blocks.values()):
            for spec in block.expected_components:
                kinds[spec.name].append(spec.type_hint or object)
    return kinds


def _unused_media(definition: Definition) -> frozenset[str]:
    """Returns the names of the images, video and audio that the classic pipeline takes and the blocks do not."""
    return _MEDIA_INPUTS & _classic_parameters(definition.index).keys() - set(definition.blocks.input_names)


def _component_problems(folder: Path, name: str, value: Any, kinds: Sequence[Any] | None) -> Iterator[str]:
    library, class_name = value[:2]
    if kinds is None and class_name.endswith(_WITHOUT_WEIGHTS):
        return
    if kinds is None:
        yield f"its blocks do not use the component {name} ({class_name})"
        return
    module = library if library in {"diffusers", "transformers"} else f"diffusers.pipelines.{library}"
    if (folder / name / f"{library}.py").exists() or find_spec(module) is None:
        yield f"the component {name} ({class_name}) needs the module {library}, which is not part of diffusers"
        return
    kind = getattr(import_module(module), class_name, None)
    if kind is None:
        yield f"{library} has no class {class_name}, which is the component {name}"
    elif not any(_fits(kind, declared) for declared in kinds):
        expected = " or ".join(dict.fromkeys(declared.__name__ for declared in kinds))
        yield f"its blocks cannot use {class_name} as {name}; they expect {expected}"


def _fits(kind: Any, declared: Any) -> bool:
    """Returns whether blocks that declare a component of the class `declared` can use one of the class `kind`."""
    if issubclass(kind, declared):
        return True
    if issubclass(declared, diffusers.SchedulerMixin):
        expected, taken = (inspect.signature(each.set_timesteps).parameters.keys() for each in (declared, kind))
        # Only schedulers for flow matching take `mu`, which shifts their noise schedule.
        is_compatible = kind.__name__ in declared._compatibles or expected & {"sigmas"} <= taken  # noqa: SLF001
        return is_compatible and expected & {"mu"} <= taken
    # Autoencoders of one latent space have several classes. Text encoders are not checked, because blocks often declare
    # a base class or the class of only one checkpoint.
    return not issubclass(kind, diffusers.ModelMixin) or "Autoencoder" in kind.__name__


def _selects(definition: Definition, name: str) -> bool:
    """Returns whether diffusers' mapping reads the setting `name` of the index to select the pipeline's class."""
    choose = MAPPING.get(definition.name)
    index = dict(definition.index)
    others = {each: value for each, value in index.items() if each != name}
    return choose is not None and choose(index) != choose(others)


def _classic_parameters(index: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a classic pipeline's constructor and of its call, with their defaults. Empty for a
    modular pipeline.
    """
    kind = getattr(diffusers, index["_class_name"])
    if issubclass(kind, diffusers.ModularPipeline):
        return {}
    calls = (inspect.signature(each).parameters.values() for each in (kind.__call__, kind.__init__))
    return {param.name: param.default for params in calls for param in params}


def _is_component(value: Any) -> bool:
    """Returns whether a value of an index describes a component: its library and its class, or two times None."""
    fields: Any = value
    return isinstance(value, list) and len(fields) > 1 and all(isinstance(each, str | None) for each in fields[:2])


def _unsupported(folder: Path, class_name: str, problem: str) -> NotReadyError:
    return NotReadyError(
        f"the diffusion engine cannot run {class_name} ({folder}): {problem}", reason="UNSUPPORTED_MODEL"
    )
