"""`k8s/models.yaml`, by which docs/kubernetes.md fills the volume of the models."""

import pytest
import yaml

from tests.cli.commands import invoke
from tests.k8s.checks import find_problems
from tests.k8s.checks.schemas import VERSIONS, check_schemas
from tests.k8s.helm import CHART, load_objects, render
from tests.k8s.manifests import Manifest, Pod, Render, pods_of, select

CLAIM, FILLER = load_objects((CHART.parent / "models.yaml").read_text())


def filler() -> Pod:
    return pods_of(FILLER)[0]


def mounts(container: Manifest) -> dict[str, str]:
    return {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_objects_satisfy_the_schemas(version: str) -> None:
    assert list(check_schemas(Render([CLAIM, FILLER]), version)) == []


def test_the_objects_have_no_problems() -> None:
    assert find_problems(Render([CLAIM, FILLER])) == []


def test_the_rendered_values_mount_the_claim_where_the_pod_fills_it() -> None:
    values = yaml.safe_load(invoke("k8s", "render", "speech").stdout)
    stage = pods_of(select(render(values), "Deployment/release-thinker"))[0]
    claims = [volume for volume in stage.spec["volumes"] if volume["name"] == "models"]
    assert claims == [volume for volume in filler().spec["volumes"] if volume["name"] == "models"]
    assert claims[0]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    assert mounts(stage.containers[0])["models"] == mounts(filler().containers[0])["models"]
    users = [pod.spec["securityContext"]["runAsUser"] for pod in (stage, filler())]
    assert users[0] == users[1]
