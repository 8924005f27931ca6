import sys

import pytest

from tests.repository.commands import run

LIGHT = ("stagemesh.client", "stagemesh.orchestrator.__main__", "stagemesh.rpc.server")
HEAVY = ("torch", "vllm", "transformers", "onnxruntime", "scipy", "numba", "pandas")


def test_no_layer_imports_a_higher_one() -> None:
    run("lint-imports", "--no-cache")


@pytest.mark.parametrize("module", LIGHT)
def test_coordinating_processes_load_no_compute_packages(module: str) -> None:
    program = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run(sys.executable, "-c", program).strip() == "[]"
