"""Renders each values file of the chart's ci folder with helm 3 and helm 4, and checks every object."""

import functools
import re
from pathlib import Path

import pytest
import yamllint.config
import yamllint.linter

from tests.k8s.checks import find_problems
from tests.k8s.checks.schemas import VERSIONS, check_schemas
from tests.k8s.helm import CHART, FILES, HELMS, HelmError, load_objects, read_values, render_text, run_helm
from tests.k8s.manifests import Render, reference, strings_of, walk

ALL_FILES = pytest.mark.parametrize("name", FILES)
ALL_HELMS = pytest.mark.parametrize("helm", HELMS)
# Empty selectors mean all pods and all namespaces, an emptyDir has default settings, and "" is a health name.
EMPTY_IS_MEANT = re.compile(r".*(podSelector|namespaceSelector|emptyDir|grpc\.service|env\.\d+\.value)")
# Of helm's own templates: the manifests are machine-made, so their layout is not judged, only what changes the meaning.
YAML_RULES = """
rules:
  anchors: enable
  colons: disable
  empty-values: enable
  key-duplicates: enable
  octal-values: enable
  trailing-spaces: enable
  truthy: enable
"""


@functools.cache
def rendered(name: str, helm: str = "helm4") -> str:
    return render_text(read_values(FILES[name]), "--kube-version", "1.33", helm=helm)


def render_of(name: str) -> Render:
    return Render(load_objects(rendered(name)), existing=strings_of(read_values(FILES[name])))


def test_there_is_a_values_file_for_each_use() -> None:
    assert set(FILES) == {
        "digits-cpu",
        "everything-off",
        "everything-on",
        "qwen-image-rdma",
        "qwen3-omni-2-nodes",
        "qwen3-omni-3-nodes",
        "qwen3-tts-autoscaled",
        "speech-cpu",
    }


@ALL_HELMS
@ALL_FILES
def test_helm_lint_accepts_the_values(name: str, helm: str) -> None:
    printed = run_helm(helm, "lint", "--strict", str(CHART), "--values", str(FILES[name]))
    assert "1 chart(s) linted, 0 chart(s) failed" in printed


@ALL_FILES
def test_helm_3_and_helm_4_render_the_same(name: str) -> None:
    # Helm 4 prints an empty line after each object.
    helm3, helm4 = ([line for line in rendered(name, helm).splitlines() if line] for helm in HELMS)
    assert helm3 == helm4


@pytest.mark.parametrize("version", ["1.33", "1.37"], ids=["same version", "newest version"])
@ALL_FILES
def test_a_second_rendering_is_equal(name: str, version: str) -> None:
    assert render_text(read_values(FILES[name]), "--kube-version", version) == rendered(name)


@pytest.mark.parametrize("version", VERSIONS)
@ALL_FILES
def test_objects_satisfy_the_schemas(name: str, version: str) -> None:
    assert list(check_schemas(render_of(name), version)) == []


@ALL_FILES
def test_objects_have_no_problems(name: str) -> None:
    assert find_problems(render_of(name)) == []


@ALL_FILES
def test_the_yaml_is_unambiguous(name: str) -> None:
    problems = yamllint.linter.run(rendered(name), yamllint.config.YamlLintConfig(YAML_RULES))
    assert [str(problem) for problem in problems] == []


@ALL_FILES
def test_no_mapping_is_empty_by_accident(name: str) -> None:
    found = [
        f"{reference(item)}: {path}"
        for item in load_objects(rendered(name))
        for path, value in walk(item)
        if value in ({}, [], "") and not EMPTY_IS_MEANT.fullmatch(path)
    ]
    assert found == []


@ALL_FILES
def test_every_object_is_in_the_namespace_of_the_release(name: str) -> None:
    namespaces = {reference(item): item["metadata"].get("namespace") for item in load_objects(rendered(name))}
    assert namespaces == dict.fromkeys(namespaces, "models")


@ALL_HELMS
def test_a_kubernetes_without_grpc_probes_is_refused(helm: str) -> None:
    with pytest.raises(HelmError, match=r"requires kubeVersion: >=1\.27\.0-0"):
        render_text(read_values(FILES["speech-cpu"]), "--kube-version", "1.26", helm=helm)


@ALL_HELMS
def test_the_chart_can_be_packaged(helm: str, tmp_path: Path) -> None:
    run_helm(helm, "package", str(CHART), "--destination", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["stagemesh-0.1.0.tgz"]
