"""Tiny folders of diffusers' pipelines: the components that a pipeline declares, each with random weights.

A pipeline is a class of diffusers, the name of a modular model of diffusers, or a variant in `configs.toml`.
"""

import inspect
import json
import sys
import warnings
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.modular_pipelines import modular_pipeline
from diffusers.pipelines import pipeline_loading_utils

from stagemesh.tiny_models.diffusion.components import Processor, diffusers, make_component, transformers
from stagemesh.tiny_models.diffusion.configs import TABLES, pipeline_table

_loading: Any = pipeline_loading_utils
_modular: Any = modular_pipeline


@dataclass(frozen=True)
class TinyPipeline:
    """A pipeline of diffusers, and what makes it small."""

    kind: Any
    """The class, modular or not."""
    components: Mapping[str, Any]
    """The class of each component that the folder contains."""
    table: Mapping[str, Any]

    @property
    def is_modular(self) -> bool:
        """Whether the pipeline consists of blocks."""
        return issubclass(self.kind, diffusers.ModularPipeline)

    def write(self, folder: Path, *, seed: int = 0) -> None:
        """Writes the folder. The same seed gives the same files."""
        with torch.random.fork_rng(devices=[]), _defined_memory(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            made = self._make()
        settings = self.table.get("settings", {})
        if not self.is_modular:
            required, _ = self.kind._get_signature_keys(self.kind)
            self.kind(**{**dict.fromkeys(required), **made, **settings}).save_pretrained(folder)
            return
        for name, component in made.items():
            component.save_pretrained(folder / name)
        _write_index(folder, self.kind, made, settings)

    def _make(self) -> dict[str, Any]:
        templates = _templates(self.kind)
        # Tokenizers come first, because processors contain them, and both determine the vocabularies of models.
        kinds = sorted(self.components.items(), key=lambda item: _TOKENIZERS.index(_base(item[1])))
        made: dict[str, Any] = {}
        for name, kind in kinds:
            config = {key: value for key, value in self.table.get(name, {}).items() if key != "class"}
            tokenizer = _tokenizer_of(name, made)
            try:
                made[name] = make_component(kind, config, tokenizer=tokenizer, templates=templates)
            except Exception as exc:
                exc.add_note(f"while making {name}, a {kind.__name__}")
                raise
        return {name: made[name] for name in self.components}


def tiny_pipeline(name: str) -> TinyPipeline | None:
    """Returns the pipeline with this name, or None if diffusers has none."""
    variant = TABLES["variants"].get(name, {})
    kind = _pipeline_class(variant.get("class", name))
    if kind is None:
        return None
    table = pipeline_table(kind.__name__) | {key: value for key, value in variant.items() if key != "class"}
    # A table may add a component that is left out otherwise. A classic class may need it.
    left_out = {each for each in (*TABLES["leave_out"], *table.get("leave_out", ())) if each not in table}
    if not issubclass(kind, diffusers.ModularPipeline):
        left_out.intersection_update(kind._optional_components)
    declared = {each: types for each, types in _declared(kind, table).items() if each not in left_out}
    components = {each: _chosen(types, table.get(each, {})) for each, types in declared.items()}
    return TinyPipeline(kind, components, table)


def _pipeline_class(name: str) -> Any:
    class_name: str = _modular.MODULAR_PIPELINE_MAPPING.get(name, lambda: name)()
    kind = getattr(diffusers, class_name, None)
    kinds = (diffusers.DiffusionPipeline, diffusers.ModularPipeline)
    return kind if inspect.isclass(kind) and issubclass(kind, kinds) else None


def _declared(kind: Any, table: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """Returns the possible classes of each component that is loaded from a folder."""
    if issubclass(kind, diffusers.ModularPipeline):
        specs = getattr(diffusers, kind.default_blocks_name)().expected_components
        loaded = {spec.name: [spec.type_hint] for spec in specs if spec.default_creation_method == "from_pretrained"}
        classic = _classic_class(kind)
        # Folders of the classic class have tokenizers in addition to processors.
        more = {} if classic is None else _declared(classic, {})
        return {name: types for name, types in more.items() if name.startswith("tokenizer")} | loaded
    components, parameters = kind._get_signature_keys(kind)
    defaults = {name: each.default for name, each in inspect.signature(kind.__init__).parameters.items()}
    types = {name: each for name, each in kind._get_signature_types().items() if name in {*components, *parameters}}
    required = {name for name, default in defaults.items() if default is inspect.Parameter.empty}
    return {name: each for name, each in types.items() if name in required or name in table}


def _chosen(types: Sequence[Any], table: Mapping[str, Any]) -> Any:
    """Returns the class that the table names, or the first class from which objects can be made."""
    if "class" in table:
        return _class_of(table["class"])
    names = [TABLES["concrete"].get(getattr(each, "__name__", ""), "") for each in types]
    kinds = [_class_of(name) if name else each for name, each in zip(names, types, strict=True)]
    return next((each for each in kinds if inspect.isclass(each)), kinds[0])


def _class_of(name: str) -> Any:
    return getattr(diffusers if hasattr(diffusers, name) else transformers, name)


_TOKENIZERS = (transformers.PreTrainedTokenizerBase, transformers.ProcessorMixin, object)


def _base(kind: Any) -> type:
    return next(each for each in _TOKENIZERS if issubclass(kind, each))


def _tokenizer_of(name: str, made: Mapping[str, Any]) -> Any:
    """Returns the tokenizer whose name has the same number at its end, or the first one."""
    parts = {each: getattr(component, "tokenizer", component) for each, component in made.items()}
    tokenizers = {each: part for each, part in parts.items() if isinstance(part, _TOKENIZERS[0])}
    prefix, _, number = name.rpartition("_")
    wanted = f"tokenizer_{number}" if prefix and number.isdigit() else "tokenizer"
    return tokenizers.get(wanted) or next(iter(tokenizers.values()), None)


def _templates(kind: Any) -> list[str]:
    """Returns the texts around prompts that the modules of a pipeline define."""
    package = kind.__module__.rpartition(".")[0]
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith(f"{package}.")]
    values = (value for module in modules for name, value in vars(module).items() if name.isupper())
    return list(dict.fromkeys(value for value in values if isinstance(value, str)))


def _write_index(folder: Path, kind: Any, made: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Writes the index of a modular pipeline in the format of the classic class, if there is one, or in its own."""
    classic = _classic_class(kind)
    names = {name: _library_and_class(component) for name, component in made.items()}
    if classic is not None and _takes(classic, made):
        index = {"_class_name": classic.__name__, "_diffusers_version": diffusers.__version__, **names, **settings}
        file = "model_index.json"
    else:
        index = {"_class_name": kind.__name__, "_diffusers_version": diffusers.__version__, **settings}
        index["_blocks_class_name"] = kind.default_blocks_name
        for name, (library, class_name) in names.items():
            spec = {"pretrained_model_name_or_path": kind.__name__, "subfolder": name, "variant": None}
            index[name] = [library, class_name, {**spec, "revision": None, "type_hint": [library, class_name]}]
        file = "modular_model_index.json"
    (folder / file).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _classic_class(kind: Any) -> Any:
    """Returns the classic class of the same model as the modular one, or None."""
    classic = getattr(diffusers, kind.__name__.replace("ModularPipeline", "Pipeline"), None)
    if classic is not None:
        return classic
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Imports every classic pipeline, which takes seconds.
        from diffusers.pipelines.auto_pipeline import SUPPORTED_TASKS_MAPPINGS
    model = getattr(diffusers, kind.default_blocks_name)().model_name
    return next((each[model] for each in SUPPORTED_TASKS_MAPPINGS if model in each), None)


def _takes(classic: Any, names: Collection[str]) -> bool:
    """Returns whether a classic class can be made from components with these names."""
    required, optional = classic._get_signature_keys(classic)
    return {*required} <= {*names, *classic._optional_components} and {*names} <= {*required, *optional}


def _library_and_class(component: Any) -> list[str]:
    if isinstance(component, Processor):
        return ["transformers", component.kind]
    return list(_loading._fetch_class_library_tuple(component))


@contextmanager
def _defined_memory() -> Generator[None]:
    """Fills memory that is not initialized with NaN. Otherwise, weights that a class leaves undefined would vary."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
