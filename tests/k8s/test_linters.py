"""Dockerfiles satisfy hadolint, and the rendered chart satisfies Checkov with a few exceptions."""

import json
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from k8s.cluster.images import MAX_ORCHESTRATOR_BYTES, check_orchestrator_size
from tests.k8s.helm import FILES, read_values, render_text
from tests.repository.commands import ROOT, run

DOCKERFILES = sorted((ROOT / "k8s" / "images").glob("*Dockerfile*"))


class Tolerated(NamedTuple):
    """A check of Checkov that some resources do not pass, and the reason why."""

    check: str
    resources: str
    """A regular expression for the values file and the resource, "FILE: KIND.NAMESPACE.NAME"."""
    reason: str


# The test of a release is a pod that sends one request and ends.
TEST_POD = r".*: Pod\.models\..*-test"
TOLERATED = (
    Tolerated("CKV_K8S_11", ".*", "A limit of CPU time would halt engines within a step. Requests reserve CPUs."),
    Tolerated("CKV_K8S_15", ".*", "A tag of a release and a digest do not move, so a node may keep the image."),
    Tolerated("CKV_K8S_43", ".*", "The values set digests. The default is the tag of the chart's own version."),
    Tolerated("CKV_K8S_8", TEST_POD, "It ends within a time limit."),
    Tolerated("CKV_K8S_9", TEST_POD, "No Service refers to it."),
    Tolerated("CKV2_K8S_6", TEST_POD, "It opens no port."),
    Tolerated("CKV_K8S_25", ".*", "IPC_LOCK pins memory for RDMA. Values enable it by stage."),
    Tolerated("CKV_K8S_35", ".*", "The values refer to secrets, whose keys programs read from their environment."),
    *(
        Tolerated(check, "everything-off: .*", "This file shows that resources may be left out.")
        for check in ("CKV_K8S_10", "CKV_K8S_12", "CKV_K8S_13")
    ),
)


def test_dockerfiles_are_found() -> None:
    names = {path.name.removesuffix(".Dockerfile") for path in DOCKERFILES}
    assert names >= {"orchestrator", "gateway", "jobs", "stage"}


def test_the_context_of_an_image_has_every_package_of_the_project() -> None:
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["dev-mode-dirs"]
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert [folder for folder in folders if f"!{folder}" not in allowed] == []


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_satisfy_hadolint(path: str) -> None:
    assert run("hadolint", "--failure-threshold", "style", str(path)) == ""


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_base_without_a_digest_is_an_error_that_names_it(path: Path) -> None:
    text = path.read_text()
    bases = [base for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE) if "BASE}" in base]
    names = {re.sub(r"[${}]", "", base).partition("@")[2] for base in bases}
    assert names == set(re.findall(r"^ARG (\w+)=\1-is-missing$", text, re.MULTILINE)) != set()
    assert len(bases) == len([base for base in bases if re.fullmatch(r"\$\{(\w+)\}@\$\{\1_DIGEST\}", base)])
    # Everything else is built from one of them.
    stages = {*re.findall(r" AS (\w+)$", text, re.MULTILINE), "${VARIANT}"}
    assert {base for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE) if base not in bases} <= stages


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_name_their_source_and_their_base(path: Path) -> None:
    text = path.read_text()
    labels = set(re.findall(r"org\.opencontainers\.image\.([\w.]+)=", text))
    assert labels >= {"title", "licenses", "version", "revision", "source", "base.name", "base.digest"}
    # Distroless images have no tags for versions.
    bases = re.findall(r"^ARG (?:BUILD_)?BASE=(?!gcr\.io/distroless/)(\S+)$", text, re.MULTILINE)
    assert bases
    assert [base for base in bases if not re.search(r":[\w-]*\d+\.\d+", base)] == []


def test_an_orchestrator_image_above_the_limit_ends_the_build() -> None:
    check_orchestrator_size(MAX_ORCHESTRATOR_BYTES - 1)
    message = "has 200,000,000 bytes, but must have less than 200,000,000; remove packages"
    with pytest.raises(SystemExit, match=message):
        check_orchestrator_size(MAX_ORCHESTRATOR_BYTES)


@pytest.fixture(scope="module")
def violations(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    """The checks of Checkov that fail, with the values file and the resource."""
    folder = tmp_path_factory.mktemp("rendered")
    for name, path in FILES.items():
        (folder / f"{name}.yaml").write_text(render_text(read_values(path)))
    command = ["--directory", str(folder), "--framework", "kubernetes", "--skip-download", "--soft-fail"]
    # Without the checks that pass, which take longer to print than to make.
    command += ["--quiet", "--compact"]
    # Its environment is its own, because its requirements contradict those of the project. `make kubernetes` makes it.
    report = json.loads(run(str(ROOT / ".venv" / "checkov" / "bin" / "checkov"), *command, "--output", "json"))
    assert report["summary"]["parsing_errors"] == 0
    assert report["summary"]["passed"] > 1000
    return {
        (found["check_id"], f"{found['file_path'].strip('/').removesuffix('.yaml')}: {found['resource']}")
        for found in report["results"]["failed_checks"]
    }


def is_tolerated(tolerated: Tolerated, violation: tuple[str, str]) -> bool:
    check, resource = violation
    return tolerated.check == check and re.fullmatch(tolerated.resources, resource) is not None


@pytest.mark.timeout(120)
def test_checkov_finds_only_what_is_tolerated(violations: set[tuple[str, str]]) -> None:
    found = [item for item in sorted(violations) if not any(is_tolerated(tolerated, item) for tolerated in TOLERATED)]
    assert found == []


@pytest.mark.timeout(120)
def test_every_toleration_is_needed(violations: set[tuple[str, str]]) -> None:
    assert [item for item in TOLERATED if not any(is_tolerated(item, each) for each in violations)] == []
