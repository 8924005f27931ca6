"""values.yaml, its schema and the templates describe the same values."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
import yamllint.config
import yamllint.linter

from tests.k8s.helm import CHART, FILES, read_values

VALUES = CHART / "values.yaml"
TEXT = VALUES.read_text()
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = "\n".join(path.read_text() for path in sorted((CHART / "templates").rglob("*.*")))
YAML_RULES = """
extends: default
rules:
  braces: {max-spaces-inside: 0}
  document-start: disable
  indentation: {indent-sequences: consistent}
  line-length: disable
"""
# Objects of Kubernetes, which values.yaml refers to as a whole.
KUBERNETES = {
    "affinity", "egressRules", "env", "envFrom", "initContainers", "labelSelector", "matchExpressions", "peers",
    "resources", "tolerations", "topologySpreadConstraints", "volumeMounts", "volumes",
}  # fmt: skip


def resolve(schema: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the name and the content of the definition that a schema refers to, or the schema itself."""
    # `allOf` combines a definition with the names of its required properties.
    schema = next((part for part in schema.get("allOf", []) if "$ref" in part), schema)
    name = schema.get("$ref", "").rpartition("/")[2]
    return (name, SCHEMA["definitions"][name]) if name else ("", schema)


def properties(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each property below a schema with its path, except those of Kubernetes' own objects."""
    for name, child in schema.get("properties", {}).items():
        definition, content = resolve(child)
        yield f"{path}{name}", content
        if definition not in KUBERNETES and name != "pipeline":
            yield from properties(content, f"{path}{name}.")


def own_properties() -> dict[str, dict[str, Any]]:
    """Returns the chart's own properties by path. `global` is helm's own key."""
    stage = properties(resolve(SCHEMA["properties"]["stages"]["additionalProperties"])[1], "stages.*.")
    group = properties(resolve(SCHEMA["properties"]["groups"]["additionalProperties"])[1], "groups.*.")
    found = {**dict(properties(SCHEMA)), **dict(stage), **dict(group)}
    return {path: schema for path, schema in found.items() if path != "global"}


def mappings(values: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield f"{path}{name}"
        if isinstance(value, dict):
            yield from mappings(value, f"{path}{name}.")


@pytest.mark.parametrize("path", [VALUES, CHART / "Chart.yaml", *FILES.values()], ids=lambda path: path.name)
def test_the_files_of_values_are_sound_yaml(path: Path) -> None:
    problems = yamllint.linter.run(path.read_text(), yamllint.config.YamlLintConfig(YAML_RULES))
    assert [str(problem) for problem in problems] == []


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)


def test_every_mapping_of_the_schema_refuses_unknown_keys() -> None:
    # A mapping with free keys says so by the schema of its values; the pipeline is checked by Stagemesh.
    lenient = [
        path
        for path, schema in own_properties().items()
        if "properties" in schema and schema.get("additionalProperties") is not False and path != "pipeline"
    ]
    assert SCHEMA["additionalProperties"] is False
    assert lenient == []


def test_every_value_of_the_schema_is_documented_by_name() -> None:
    documented = set(re.findall(r"\w+", TEXT))
    assert [path for path in own_properties() if path.rpartition(".")[2] not in documented] == []


def test_every_default_is_in_the_schema() -> None:
    known = own_properties()
    free = ("resources.", "labels.", "annotations.", "pipeline.")
    unknown = [path for path in mappings(read_values(VALUES)) if path not in known]
    assert [path for path in unknown if not any(part in f"{path}." for part in free)] == []


def lines(node: yaml.MappingNode, path: str = "") -> Iterator[tuple[str, int]]:
    """Yields the path of each value of values.yaml and the index of its line."""
    for key, value in node.value:
        yield f"{path}{key.value}", key.start_mark.line
        if isinstance(value, yaml.MappingNode):
            yield from lines(value, f"{path}{key.value}.")


def is_explained(name: str, line: int) -> bool:
    """Returns whether a comment is directly above a value, or is above the values before it and contains its name.

    The comment "Its command, its arguments" contains the name `args`, because their first three letters are equal. One
    word of a longer name may be missing.
    """
    text = TEXT.splitlines()
    if text[line - 1].lstrip().startswith("#"):
        return True
    indent = len(text[line]) - len(text[line].lstrip())
    while re.match(rf" {{{indent}}}\w", text[line - 1]):
        line -= 1
    comment = ""
    while text[line - 1].lstrip().startswith("#"):
        line -= 1
        comment = f"{text[line].lower()} {comment}"
    words = re.findall(r"[A-Z]?[a-z]+", name)
    found = [word for word in words if re.search(rf"\b{word[:3].lower()}", comment)]
    return len(found) >= max(1, len(words) - 1)


def test_every_value_is_explained_by_a_comment() -> None:
    root = yaml.compose(TEXT, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    known, found = own_properties(), {path: (path.rpartition(".")[2], line) for path, line in lines(root)}
    # A key that occurs several times has one meaning.
    explained = {name for name, line in found.values() if is_explained(name, line)}
    assert [path for path, (name, _) in found.items() if path in known and name not in explained] == []


def test_every_value_is_used_by_a_template() -> None:
    names = {path: path.rpartition(".")[2] for path in own_properties()}
    assert [path for path, name in names.items() if not re.search(rf"\.{name}\b|\"{name}\"", TEMPLATES)] == []


def test_comments_name_no_value_that_does_not_exist() -> None:
    known = {path.rpartition(".")[2] for path in own_properties()}
    quoted = re.findall(r"`(\w+)`", "\n".join(line for line in TEXT.splitlines() if line.lstrip().startswith("#")))
    # Keys of the pipeline file.
    assert [name for name in quoted if name not in known | {"replicas", "group"}] == []
