"""Reads the config and the weights of one stage from an ordinary checkpoint folder."""

from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from stagemesh.common.errors import InvalidRequestError, NotReadyError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = WEIGHTS + ".index.json"
_MAX_LISTED_NAMES = 10
_OBJECT, _FILES = TypeAdapter(dict[str, Any]), TypeAdapter(dict[str, str])

Section = TypeVar("Section")


def require_folder(model: Path | None, needed_by: str, *, setting: str = "the stage's `model`") -> Path:
    """Returns the checkpoint folder `model`. Raises InvalidRequestError (INVALID_CONFIG) if it is None.

    `needed_by` names the function or transform in the message, and `setting` what sets the folder.
    """
    if model is None:
        raise InvalidRequestError(f"{needed_by} needs a checkpoint folder; set {setting}", reason="INVALID_CONFIG")
    return model


@lru_cache(maxsize=8)
def read_config(folder: Path, *, model_type: str | None = None) -> Mapping[str, Any]:
    """Returns the content of the checkpoint's config.json. The index of an absent field raises LOAD_FAILED, too.

    Raises NotReadyError (LOAD_FAILED) if the file is missing or is not a JSON object, or if its `model_type` differs
    from the parameter of this name.
    """
    config = _read_json(folder / CONFIG)
    if model_type is not None and config.get("model_type") != model_type:
        raise load_error(
            folder,
            f"its {CONFIG} has the model_type {config.get('model_type')!r}, but the stage needs {model_type!r}; "
            "choose another model, or another function",
        )
    return _Fields.of(config, folder)


def read_section(folder: Path, config: Mapping[str, Any], *, name: str, kind: type[Section]) -> Section:
    """Parses the part `name` of a checkpoint's config into the dataclass `kind`, which may omit fields.

    `folder` is named in the error message. Raises NotReadyError (LOAD_FAILED), which names the invalid field.
    """
    try:
        return TypeAdapter(kind).validate_python(config.get(name))
    except ValidationError as exc:
        first = exc.errors()[0]
        field = ".".join(map(str, (name, *first["loc"])))
        raise load_error(folder, f"in its {CONFIG}, {field} is {first['input']!r}: {first['msg']}") from exc


def read_generation_config(folder: Path) -> Mapping[str, Any]:
    """Returns the content of the checkpoint's generation_config.json, or nothing if it has no readable one."""
    try:
        return _OBJECT.validate_json((folder / "generation_config.json").read_bytes())
    except (OSError, ValidationError):
        return {}


def load_weights(folder: Path, prefix: str) -> dict[str, "Tensor"]:
    """Returns the weights whose names start with `prefix`, by name, on the CPU.

    Opens only the files that contain such weights. Raises NotReadyError (LOAD_FAILED) if the checkpoint has no weights
    or an invalid file.
    """
    weights: dict[str, Tensor] = {}
    for path in _files_of(folder, prefix):
        with _opened(path, framework="pt") as file:
            weights |= {name: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118
    return weights


def fill_module(module: "nn.Module", folder: Path, *, prefix: str, what: str, device: "torch.device") -> None:
    """Loads a module's weights, whose names in the checkpoint start with `prefix`, as float32, for inference alone.

    `what` names the module in messages. Raises NotReadyError (LOAD_FAILED) if weights are missing, superfluous or of
    another shape.
    """
    weights = {name.removeprefix(prefix): weight.float() for name, weight in load_weights(folder, prefix).items()}
    check_names(module.state_dict().keys(), weights.keys(), f"{what} in {folder}")
    try:
        module.load_state_dict(weights, assign=True)
    except RuntimeError as exc:
        raise load_error(folder, f"the weights of {what} do not fit its config: {exc}") from exc
    module.to(device).train(mode=False)


def weight_names(folder: Path, prefix: str) -> set[str]:
    """Returns the names of the checkpoint's weights that start with `prefix`, without reading the weights.

    Raises NotReadyError (LOAD_FAILED) if the checkpoint has no weights or an invalid file.
    """
    names: set[str] = set()
    for path in _files_of(folder, prefix):
        with _opened(path, framework="numpy") as file:
            names.update(name for name in file.keys() if name.startswith(prefix))  # noqa: SIM118
    return names


def check_names(expected: Collection[str], found: Collection[str], what: str) -> None:
    """Raises NotReadyError (LOAD_FAILED) if weights are missing or superfluous. The message lists their names.

    `what` names the model and its checkpoint in the message.
    """
    kinds = {"missing": set(expected) - set(found), "unknown": set(found) - set(expected)}
    problems = [f"{kind}: {list_names(names)}" for kind, names in kinds.items() if names]
    if problems:
        raise NotReadyError(
            f"the weights of {what} do not fit its config; {'; '.join(problems)}; check that the checkpoint is "
            "complete and belongs to this model",
            reason="LOAD_FAILED",
        )


def list_names(names: Iterable[str]) -> str:
    """Returns the names in order, separated by commas. Replaces all names after the tenth with their number."""
    ordered = sorted(names)
    listed = ", ".join(ordered[:_MAX_LISTED_NAMES])
    further = len(ordered) - _MAX_LISTED_NAMES
    return f"{listed} and {further} more" if further > 0 else listed


def load_error(folder: Path, problem: str) -> NotReadyError:
    """Returns the error for a checkpoint that cannot be loaded. `problem` states the reason."""
    return NotReadyError(f"the model {folder} cannot be loaded: {problem}", reason="LOAD_FAILED")


class _Fields(dict[str, Any]):
    """The fields of a part of a config. The index of an absent field raises an error that names the field."""

    folder: Path
    prefix: str

    @classmethod
    def of(cls, fields: Mapping[str, Any], folder: Path, prefix: str = "") -> "_Fields":
        made = cls(fields)
        made.folder, made.prefix = folder, prefix
        for name, value in fields.items():
            if isinstance(value, dict):
                made[name] = cls.of(cast("dict[str, Any]", value), folder, f"{prefix}{name}.")
        return made

    def __missing__(self, name: str) -> Never:
        raise load_error(
            self.folder,
            f"its {CONFIG} has no {self.prefix}{name}; check that it belongs to this model, and copy it again",
        )


@contextmanager
def _opened(path: Path, *, framework: str) -> Generator[Any]:
    """Opens a file of weights. Raises NotReadyError (LOAD_FAILED) if the file cannot be opened or read."""
    from safetensors import SafetensorError, safe_open

    opened: Any = safe_open
    try:
        with opened(path, framework=framework) as file:
            yield file
    except (OSError, SafetensorError) as exc:
        raise load_error(path.parent, f"its {path.name} cannot be read: {exc}; copy it again") from exc


def _files_of(folder: Path, prefix: str) -> list[Path]:
    """Returns the files that contain weights whose names start with `prefix`."""
    if not (folder / INDEX).exists():
        if not (folder / WEIGHTS).exists():
            raise load_error(folder, f"it has neither {WEIGHTS} nor {INDEX}")
        return [folder / WEIGHTS]
    try:
        files = _FILES.validate_python(_read_json(folder / INDEX).get("weight_map"))
    except ValidationError as exc:
        raise load_error(folder, f"its {INDEX} has no weight_map that names the file of each weight") from exc
    return [folder / file for file in sorted({file for name, file in files.items() if name.startswith(prefix)})]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return _OBJECT.validate_json(path.read_bytes())
    except OSError as exc:
        raise load_error(path.parent, f"its {path.name} cannot be read: {exc.strerror}") from exc
    except ValidationError as exc:
        problem = exc.errors()[0]["msg"]
        raise load_error(path.parent, f"its {path.name} is not a JSON object: {problem}") from exc
