"""A transform of an external package: hidden states of one stage become the next one's embeddings by position."""

import os
from pathlib import Path

import pytest

_MODULE = """\
from stagemesh.connectors.edge import Packet
from stagemesh.common.tensors import TensorSpec
from stagemesh.common.descriptors import TransformDescriptor

_ROWS = TensorSpec("float32", ("tokens", "hidden"))
DESCRIPTOR = TransformDescriptor({"hidden_states": _ROWS}, {"inputs_embeds": _ROWS}, "renamed_states:Renamed")


class Renamed:
    def push(self, packet):
        return [Packet({"inputs_embeds": packet.tensors["hidden_states"]}, packet.metadata)]

    def finish(self):
        return []
"""


def add_transform(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the transform "renamed" for all processes that are started afterwards."""
    (folder / "renamed_states.py").write_text(_MODULE)
    package = folder / "renamed_states-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: renamed_states\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[stagemesh.transforms]\nrenamed = renamed_states:DESCRIPTOR\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", ""))))
