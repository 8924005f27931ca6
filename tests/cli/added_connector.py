"""A connector of a plug-in. It takes precedence over all others, but its module is missing."""

import os
from pathlib import Path

import pytest

NUMBER = 1000
_MODULE = f"""\
from stagemesh.common.plugins.connectors import ConnectorDescriptor
DESCRIPTOR = ConnectorDescriptor("pigeon", {NUMBER}, 5, "pigeon:Pigeon", module="not_there", remedy="feed it")
"""


def add_connector(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs connector "pigeon" for every process that is started after this call."""
    (folder / "pigeon.py").write_text(_MODULE)
    package = folder / "pigeon-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeon\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[stagemesh.connectors]\npigeon = pigeon:DESCRIPTOR\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", ""))))
