import subprocess
import sys

import pytest

from tests.cli.commands import invoke

HEAVY = ("torch", "vllm", "numpy", "grpc", "pydantic")
LIST_HEAVY = f"""
import sys
from stagemesh.orchestrator.cli.main import app
app(["--help"], standalone_mode=False)
print("loaded:", [name for name in {HEAVY!r} if name in sys.modules])
"""
IMPORT_ALL = """
import sys
from stagemesh.orchestrator.cli import output_sinks, pipeline_graph, process_display
print("loaded:", [name for name in ("torch", "vllm", "onnxruntime", "scipy") if name in sys.modules])
"""


@pytest.mark.parametrize("program", [LIST_HEAVY, IMPORT_ALL])
def test_no_heavy_package_is_imported(program: str) -> None:
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "loaded: []"


def test_help_lists_the_commands() -> None:
    ran = invoke("--help")
    assert ran.exit_code == 0
    assert all(
        name in ran.stdout
        for name in ("up", "generate", "pipeline", "stages", "models", "probe-transport", "demo", "version")
    )


def test_version_prints_the_version() -> None:
    assert invoke("version").stdout.startswith("stagemesh 0.")


def test_an_unknown_command_is_a_usage_error() -> None:
    assert invoke("fly").exit_code == 2
