"""A connector of a plug-in. It takes precedence over all others, but its module is missing."""

from pathlib import Path

import pytest

from tests.system.added_transforms import add_package

NUMBER = 1000
_MODULE = f"""\
from stagemesh.common.plugins.connectors import ConnectorDescriptor
DESCRIPTOR = ConnectorDescriptor("pigeon", {NUMBER}, 5, "pigeon:Pigeon", module="not_there", remedy="feed it")
"""


def add_connector(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs connector "pigeon" for every process that is started after this call."""
    (folder / "pigeon.py").write_text(_MODULE)
    entry_points = "[stagemesh.connectors]\npigeon = pigeon:DESCRIPTOR\n"
    add_package(folder, monkeypatch, name="pigeon", entry_points=entry_points)
