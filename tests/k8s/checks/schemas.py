"""Validates objects against the schemas of Kubernetes versions, and custom resources against their own schemas."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.k8s.manifests import Manifest, Render, pods_of, reference

VERSIONS = ("1.29", "1.33", "1.37")
_SPECS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("custom_resources.yaml").read_text())["specs"]
"""The schema of `spec` by the version and the kind of a custom resource."""


def _closed(schema: Any) -> Any:
    """Returns a schema whose mappings are not empty, and have only the fields in `properties`."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items() if key != "properties"}
    if "properties" in schema:
        closed |= {"type": "object", "additionalProperties": False, "minProperties": 1}
        closed["properties"] = {name: _closed(each) for name, each in schema["properties"].items()}
    return closed


def check_schemas(render: Render, version: str) -> Iterator[str]:
    """Yields what the schemas of a Kubernetes version refuse. An object without a schema is a problem, too."""
    for item in render.objects:
        spec = _SPECS.get(f"{item['apiVersion']} {item['kind']}")
        if spec is None:
            yield from _check_builtin(item, reference(item), version)
            continue
        properties = {"apiVersion": {}, "kind": {}, "metadata": {"type": "object", "minProperties": 1}, "spec": spec}
        schema = _closed({"required": [*properties], "properties": properties})
        for error in jsonschema.Draft202012Validator(schema).iter_errors(item):
            yield f"{reference(item)}: {'.'.join(map(str, error.path))}: {error.message}"
        if item["kind"] == "LeaderWorkerSet":
            for pod in pods_of(item):
                # Only the schema of a PodTemplate contains a pod's specification and nothing else.
                template = {
                    "apiVersion": "v1",
                    "kind": "PodTemplate",
                    "metadata": {"name": item["metadata"]["name"]},
                    "template": {"metadata": {"labels": pod.labels, "annotations": pod.annotations}, "spec": pod.spec},
                }
                yield from _check_builtin(template, pod.where, version)


def _check_builtin(item: Manifest, where: str, version: str) -> Iterator[str]:
    try:
        kubernetes_validate.validate(item, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{where}: {'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError as error:
        yield f"{where}: {error.message}"
