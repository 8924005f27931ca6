"""No layer imports a higher one, modules import each other in no circle, and folders stay small."""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.repository.commands import ROOT, SOURCES, run

LIGHT = (
    "stagemesh.client",
    "stagemesh.orchestrator.__main__",
    "stagemesh.rpc.server",
    # Descriptors, which the orchestrator reads.
    "stagemesh.services.models.qwen2_5_omni, stagemesh.services.models.qwen3_omni, stagemesh.services.models.qwen3_tts",
)
HEAVY = ("torch", "vllm", "transformers", "onnxruntime", "scipy", "numba", "pandas")
MAX_MODULES_OF_A_FOLDER = 17
MODULES = {
    ".".join(path.relative_to(ROOT / source).with_suffix("").parts).removesuffix(".__init__"): path
    for source in SOURCES
    for path in (ROOT / source).rglob("*.py")
    if "_pb2" not in path.name
}


def imported(node: ast.AST) -> Iterator[str]:
    """Yields the names that code imports, except those for type checkers alone."""
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Import(names=names):
            yield from (each.name for each in names)
        case ast.ImportFrom(module=str(module), names=names):
            yield module
            yield from (f"{module}.{each.name}" for each in names)
        case _:
            pass
    for child in ast.iter_child_nodes(node):
        yield from imported(child)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Returns the modules of a circle of imports, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_layer_imports_a_higher_one() -> None:
    run("lint-imports", "--no-cache")


def test_modules_import_each_other_in_no_circle() -> None:
    imports = {name: set(imported(ast.parse(path.read_text()))) for name, path in MODULES.items()}
    assert len(imports) > 300
    assert circle({name: found & MODULES.keys() - {name} for name, found in imports.items()}) == []


def test_a_circle_is_found_and_imports_for_type_checkers_are_left_out() -> None:
    code = "import a.b\nif TYPE_CHECKING:\n    import c\ndef f():\n    from d import e\n"
    assert list(imported(ast.parse(code))) == ["a.b", "d", "d.e"]
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}


def test_no_folder_has_too_many_modules() -> None:
    sizes = Counter(path.parent for path in MODULES.values() if path.name != "__init__.py")
    assert {str(folder): size for folder, size in sizes.items() if size > MAX_MODULES_OF_A_FOLDER} == {}


@pytest.mark.parametrize("module", LIGHT)
def test_coordinating_processes_load_no_compute_packages(module: str) -> None:
    program = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run(sys.executable, "-c", program).strip() == "[]"
