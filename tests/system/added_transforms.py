"""Transforms and functions of external packages."""

import os
from pathlib import Path

import pytest

RENAMED = """\
from stagemesh.connectors.packets import Packet
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.common.plugins.descriptors import TransformDescriptor

_ROWS = TensorSpec("float32", ("tokens", "hidden"))
DESCRIPTOR = TransformDescriptor({"hidden_states": _ROWS}, {"inputs_embeds": _ROWS}, "added_renamed:Renamed")


class Renamed:
    def __init__(self, model):
        pass

    def push(self, packet):
        return [Packet({"inputs_embeds": packet.tensors["hidden_states"]}, packet.metadata)]

    def finish(self):
        return []
"""
"""Turns hidden states of one stage into the next one's embeddings by position."""
DOUBLED = """\
import numpy as np
from stagemesh.connectors.packets import Packet
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.common.plugins.descriptors import TransformDescriptor

_TEXT = {"text": TensorSpec("uint8", ("bytes",))}
DESCRIPTOR = TransformDescriptor(_TEXT, _TEXT, "added_doubled:Doubled")


class Doubled:
    def __init__(self, model):
        self._last = b""

    def push(self, packet):
        self._last, text = packet.tensors["text"].tobytes()[-5:], self._last + packet.tensors["text"].tobytes()[:-5]
        return [Packet({"text": np.repeat(np.frombuffer(text, np.uint8), 2)})]

    def finish(self):
        return [Packet({"text": np.repeat(np.frombuffer(self._last, np.uint8), 2)})]
"""
"""Repeats each byte of a text, and retains the last five bytes of each packet until the next one."""


def add_transform(folder: Path, monkeypatch: pytest.MonkeyPatch, *, name: str, source: str) -> None:
    """Registers a transform in this process and in those that start afterwards. `source` defines its DESCRIPTOR."""
    _add(folder, monkeypatch, name=name, source=source, group="stagemesh.transforms")


def add_function(folder: Path, monkeypatch: pytest.MonkeyPatch, *, name: str, source: str) -> None:
    """Registers a function like `add_transform`."""
    _add(folder, monkeypatch, name=name, source=source, group="stagemesh.functions")


def _add(folder: Path, monkeypatch: pytest.MonkeyPatch, *, name: str, source: str, group: str) -> None:
    (folder / f"added_{name}.py").write_text(source)
    entry_points = f"[{group}]\n{name} = added_{name}:DESCRIPTOR\n"
    add_package(folder, monkeypatch, name=f"added_{name}", entry_points=entry_points)
    monkeypatch.syspath_prepend(str(folder))


def add_package(folder: Path, monkeypatch: pytest.MonkeyPatch, *paths: Path, name: str, entry_points: str) -> None:
    """Installs a package with entry points for every process that starts afterwards.

    Its modules are in `folder` or in one of `paths`.
    """
    write_package(folder, name=name, entry_points=entry_points)
    path = os.pathsep.join((str(folder), *map(str, paths), os.environ.get("PYTHONPATH", "")))
    monkeypatch.setenv("PYTHONPATH", path)


def write_package(folder: Path, *, name: str, entry_points: str) -> None:
    """Writes the metadata of a package, which every process that imports from `folder` finds there."""
    package = folder / f"{name}-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(entry_points)
