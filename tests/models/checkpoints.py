"""Changes of checkpoint folders."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from pydantic import JsonValue
from safetensors.torch import load_file, save_file
from torch import Tensor

Change = Callable[[Path], object]


def changed(model: Path, folder: Path, change: Change) -> Path:
    """Copies a model into a new folder within `folder`, and changes the copy. Returns its folder."""
    copy = Path(shutil.copytree(model, folder / "model"))
    change(copy)
    return copy


def set_field(path: str, value: JsonValue, *, within: str = ".") -> Change:
    """Sets a field of the config, whose name follows the names of its sections after dots.

    `within` is the folder of the config.
    """
    *sections, field = path.split(".")

    def change(model: Path) -> None:
        file = model / within / "config.json"
        config = section = json.loads(file.read_text())
        for name in sections:
            section = section[name]
        section[field] = value
        file.write_text(json.dumps(config))

    return change


def change_weights(change: Callable[[dict[str, Tensor]], object], *, within: str = ".") -> Change:
    """Changes the weights, by name, of the checkpoint in the folder `within`."""

    def apply(model: Path) -> None:
        file = model / within / "model.safetensors"
        weights = load_file(file)
        change(weights)
        save_file(weights, file, {"format": "pt"})

    return apply


def renamed(name: str, other: str, *, prefix: str = "", of: str = "", within: str = ".") -> tuple[Change, str]:
    """Returns the change that renames a weight, and a pattern of the error, which omits the prefix of both names.

    `of` is a pattern of the text before the names. `within` is the folder of the checkpoint.
    """
    change = change_weights(lambda weights: weights.update({prefix + other: weights.pop(prefix + name)}), within=within)
    return change, f"{of}missing: {re.escape(name)}; unknown: {re.escape(other)};"
