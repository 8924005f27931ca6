"""The npm package `stagemesh`: its content, and the programs of the documents in a project that has installed it."""

import itertools
import json
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.deployment import Deployment, deployed_for_module
from tests.repository.code_blocks import read_blocks
from tests.system.conversing import talking
from tests.typescript.nodes import PACKAGE, ROOT, node

DOCUMENTS = ("docs/clients.md", "clients/typescript/README.md")
BEGINNINGS = ("Tell me about the sea.", "And why is it salty?")
COMPILE = (
    *(node(), str(ROOT / "node_modules" / "typescript" / "bin" / "tsc")),
    *("--strict", "--target", "es2023", "--module", "nodenext"),
    *("--types", "node", "--typeRoots", str(ROOT / "node_modules" / "@types")),
)
CLIENT = (
    'import { audioPart, StagemeshClient } from "stagemesh";\nconst client = new StagemeshClient(["127.0.0.1:7780"]);\n'
)


@pytest.fixture(scope="module")
def tarball(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    command = ["npm", "--offline", "--loglevel=error", "pack", str(PACKAGE), "--pack-destination", str(folder)]
    subprocess.run(command, cwd=folder, check=True)
    (packed,) = folder.iterdir()
    return packed


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tarball: Path) -> Path:
    """Returns a project with the tarball and the packages that it depends on, and no others.

    Those come from the repository's node_modules, which `make typescript` installs from package-lock.json.
    """
    folder = tmp_path_factory.mktemp("project")
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    installed = folder / "node_modules"
    installed.mkdir()
    with tarfile.open(tarball) as files:
        files.extractall(installed, filter="data")
    package = (installed / "package").rename(installed / "stagemesh")
    for name in json.loads((package / "package.json").read_text())["dependencies"]:
        (installed / name).parent.mkdir(exist_ok=True)
        (installed / name).symlink_to(ROOT / "node_modules" / name)
    return folder


up = deployed_for_module(lambda folder: talking(folder, steps=4, step_s=0))


def programs(document: str, *, beginning: str) -> list[str]:
    """Returns the programs of a document that contain a text. Those without a client get one."""
    blocks = [block.code for block in read_blocks(document) if block.language == "typescript"]
    found = [code if "import" in code else f"{CLIENT}{code}client.close();" for code in blocks if beginning in code]
    assert found
    return found


def test_the_package_has_code_types_readme_and_license(tarball: Path) -> None:
    with tarfile.open(tarball) as files:
        names = {name.removeprefix("package/") for name in files.getnames()}
    assert {"package.json", "README.md", "LICENSE", "dist/index.js", "dist/index.d.ts"} <= names
    assert {"dist/gen/stagemesh/v1/orchestrator.js", "dist/gen/stagemesh/v1/orchestrator.d.ts"} <= names
    others = names - {"package.json", "README.md", "LICENSE"}
    assert all(name.startswith("dist/") and name.endswith((".js", ".d.ts")) for name in others)


def test_every_export_exists() -> None:
    exports = json.loads((PACKAGE / "package.json").read_text())["exports"]
    for conditions in exports.values():
        for target in conditions.values():
            assert list(PACKAGE.glob(target.removeprefix("./")))


@pytest.fixture(scope="module")
def compiled(project: Path, up: Deployment) -> dict[tuple[str, str], list[Path]]:
    """Compiles the programs of all documents together. Returns those of each document by a text that they contain."""
    found = dict[tuple[str, str], list[Path]]()
    for number, (document, beginning) in enumerate(itertools.product(DOCUMENTS, BEGINNINGS)):
        files = found[document, beginning] = []
        for code in programs(document, beginning=beginning):
            files.append(project / f"program{number}_{len(files)}.ts")
            files[-1].write_text(code.replace("127.0.0.1:7780", up.endpoint))
    sources = [file.name for files in found.values() for file in files]
    subprocess.run([*COMPILE, *sources], cwd=project, check=True, timeout=50)
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_programs_of_documents_run_in_an_empty_project(
    project: Path, compiled: dict[tuple[str, str], list[Path]], document: str, beginning: str
) -> None:
    for program in compiled[document, beginning]:
        command = [node(), program.with_suffix(".js").name]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False, timeout=30)
        assert (done.returncode, done.stderr) == (0, "")
        assert re.search(r"Step 3 is|audio 1", done.stdout)
