"""Runs helm 3 and helm 4 on the chart. `make kubernetes` installs both."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.k8s.manifests import Manifest
from tests.repository.commands import ROOT

CHART = ROOT / "k8s" / "chart"
FILES = {path.name.removesuffix("-values.yaml"): path for path in sorted((CHART / "ci").glob("*-values.yaml"))}
"""The values files of the chart's ci folder by their names."""
HELMS = ("helm3", "helm4")
RELEASE = "release"
NAMESPACE = "models"

Values = Mapping[str, Any]


class HelmError(Exception):
    """Raised if helm rejects a chart or its values. The message is what helm printed."""


class _StrictLoader(yaml.CSafeLoader):
    """Refuses a mapping that has a key twice, which YAML parsers otherwise resolve in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if repeated := [key for key in keys if keys.count(key) > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key {repeated[0]!r}", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def load_objects(text: str) -> list[Manifest]:
    """Returns the objects of a YAML stream. Raises YAMLError if a mapping has a key twice."""
    return [item for item in yaml.load_all(text, Loader=_StrictLoader) if item]


def read_values(path: Path) -> dict[str, Any]:
    """Returns the values of a file."""
    values: dict[str, Any] = yaml.load(path.read_text(), Loader=_StrictLoader)  # noqa: S506 (a safe loader)
    return values


def render_text(values: Values, *options: str, helm: str = "helm4", chart: Path = CHART) -> str:
    """Returns what `helm template` prints. Raises HelmError if the chart refuses the values."""
    # As JSON, because helm reads some plain texts of YAML (y, 1e3) as other types than PyYAML, which would write them.
    command = ["template", RELEASE, str(chart), "--namespace", NAMESPACE, "--values", "-", *options]
    return run_helm(helm, *command, stdin=json.dumps(values))


def render(values: Values, *options: str, helm: str = "helm4") -> list[Manifest]:
    """Returns the objects that the chart makes of the values. Raises HelmError if the chart refuses the values."""
    return load_objects(render_text(values, *options, helm=helm))


def run_helm(helm: str, *arguments: str, stdin: str = "") -> str:
    """Returns the standard output of one of `HELMS`. Raises HelmError with the error output if it fails."""
    program = Path(sys.executable).with_name(helm)
    assert program.exists(), f"{program} does not exist. Run `make kubernetes`."
    ran = subprocess.run([str(program), *arguments], input=stdin, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise HelmError(ran.stderr + ran.stdout)
    return ran.stdout
