import sys

import pytest

from tests.repository.commands import run

LIGHT = ("stagemesh.client", "stagemesh.orchestrator.__main__", "stagemesh.rpc.server")
HEAVY = ("torch", "vllm", "transformers", "onnxruntime", "scipy", "numba", "pandas")


def test_no_layer_reaches_up_or_aside() -> None:
    run("lint-imports", "--no-cache")


@pytest.mark.parametrize("module", LIGHT)
def test_what_only_coordinates_never_loads_what_computes(module: str) -> None:
    program = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run(sys.executable, "-c", program).strip() == "[]"
