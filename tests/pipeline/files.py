"""Loads pipeline files whose engines and transforms have only descriptors, and tables of mistakes in such files."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from stagemesh.common.errors import InvalidPipelineError, NotFoundError
from stagemesh.common.plugins import entry_points
from stagemesh.common.plugins.descriptors import Emitted, EngineDescriptor, OptionSpec, Signature, TransformDescriptor
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.pipeline import Pipeline, load_pipeline

_TEXT = TensorSpec.parse("uint8[bytes]")
_SAMPLES = TensorSpec.parse("float32[samples]")
_FRAMES = TensorSpec.parse("float32[frames, 8]")
_WIDER = TensorSpec.parse("float32[frames, 16]")
_WORDS = TensorSpec.parse("int32[words]")
_SIGNATURES = {
    "talk": Signature(emits={"text": Emitted(_TEXT, kind="text"), "token_ids": Emitted(TensorSpec.parse("int64[n]"))}),
    "read": Signature(accepts={"text": _TEXT}, emits={"frames": Emitted(_FRAMES)}),
    "sing": Signature(accepts={"frames": _FRAMES}, emits={"audio": Emitted(_SAMPLES, kind="audio")}),
    "film": Signature(
        accepts={"frames": _FRAMES},
        emits={
            "video": Emitted(TensorSpec.parse("float32[frames, 3, height, width]")),
            "poster": Emitted(TensorSpec.parse("uint8[bytes]"), kind="image"),
        },
    ),
    "hear": Signature(accepts={"audio": _SAMPLES}, emits={"speech": Emitted(TensorSpec.parse("float64[events, 2]"))}),
    "lipread": Signature(accepts={"audio": _SAMPLES, "text": _TEXT}, emits={"speech": Emitted(_TEXT)}),
    "listen": Signature(
        accepts={"audio": _SAMPLES, "text": _TEXT},
        emits={"speech": Emitted(_TEXT)},
        optional=frozenset({"audio", "text"}),
    ),
    "wide": Signature(accepts={"frames": _WIDER}, emits={"text": Emitted(_TEXT)}),
    "mix": Signature(accepts={"text": _TEXT, "frames": _FRAMES}, emits={"text": Emitted(_TEXT)}),
    "blend": Signature(
        accepts={"text": _TEXT, "frames": _FRAMES},
        emits={"frames": Emitted(_FRAMES)},
        options={"speed": OptionSpec(1.0, 0.5, 2.0)},
        optional=frozenset({"text", "frames"}),
    ),
    "drawl": Signature(
        accepts={"frames": _FRAMES}, emits={"frames": Emitted(_FRAMES)}, options={"speed": OptionSpec(0.7, 0.6, 3.0)}
    ),
}
_ENGINES = {
    "plain": EngineDescriptor(
        factory="",
        signature=lambda name, _: _signature_of(name or ""),
        needs_model=False,
        needs_function=True,
        stage_options=frozenset({"max_len", "device"}),
    ),
    "heavy": EngineDescriptor(factory="", signature=lambda *_: _SIGNATURES["talk"], needs_model=True),
    "lone": EngineDescriptor(factory="", signature=lambda *_: _SIGNATURES["blend"], needs_model=False, joins=False),
}
_TRANSFORMS = {
    "text.upper": TransformDescriptor(takes={"text": _TEXT}, gives={"text": _TEXT}, factory=""),
    "text.split": TransformDescriptor(takes={"text": _TEXT}, gives={"text": _TEXT, "words": _WORDS}, factory=""),
    "frames.wider": TransformDescriptor(takes={"frames": _FRAMES}, gives={"frames": _WIDER}, factory=""),
}

SECTIONS: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())
"""The sections of mistakes.yaml, which says what they contain."""


def _signature_of(name: str) -> Signature:
    if name not in _SIGNATURES:
        raise NotFoundError(f"unknown function {name!r}; known: {', '.join(sorted(_SIGNATURES))}")
    return _SIGNATURES[name]


def installed(**groups: Mapping[str, object]) -> AbstractContextManager[object]:
    """Makes these descriptors the only installed ones. `groups` has them by group, such as "engines", and by name."""

    def names(group: str, _: object) -> Mapping[str, object]:
        given = groups.get(group.removeprefix("stagemesh."), {})
        return {name: [SimpleNamespace(value="", dist=None, load=partial(given.__getitem__, name))] for name in given}

    return patch.object(entry_points, "_names", names)


def edited(text: str, *edits: str) -> str:
    """Returns a text after some edits. `edits` are pairs: a text that must occur, and its replacement."""
    for before, after in zip(edits[::2], edits[1::2], strict=True):
        assert before in text
        text = text.replace(before, after)
    return text


def load(
    folder: Path, text: str, *, engines: Mapping[str, EngineDescriptor] | None = _ENGINES, **arguments: Any
) -> Pipeline:
    """Loads a pipeline file with this text. `arguments` are passed to `load_pipeline`.

    `engines` are the installed engines. If it is None, Stagemesh's own engines are installed.
    """
    path = folder / "pipeline.yaml"
    path.write_text(text)
    given: dict[str, Any] = {"variables": {}, **arguments}
    with nullcontext() if engines is None else installed(engines=engines, transforms=_TRANSFORMS):
        return load_pipeline(str(path), **given)


def errors(folder: Path, text: str, **arguments: Any) -> list[str]:
    """Returns the errors of a pipeline file with this text, each as "LINE: error; remedy"."""
    with pytest.raises(InvalidPipelineError) as caught:
        load(folder, text, **arguments)
    return caught.value.message.replace(f"{folder}/pipeline.yaml:", "").splitlines()


def good(section: str) -> str:
    """Returns the sound pipeline file of a section of mistakes.yaml."""
    file: str = SECTIONS[section]["file"]
    return file
