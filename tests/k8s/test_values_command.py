"""The values files of `stagemesh k8s render`, rendered by the chart."""

from pathlib import Path

import pytest
import yaml

from stagemesh.pipeline import load_pipeline
from tests.cli.commands import invoke
from tests.k8s.helm import CHART, HELMS, load_objects, run_helm
from tests.k8s.manifests import Manifest, all_pods
from tests.repository.commands import ROOT

_EXAMPLES = ROOT / "examples"
_REHEARSAL = str(_EXAMPLES / "rehearsal" / "pipeline.yaml")
_EXTERNAL = str(_EXAMPLES / "external" / "pipeline.yaml")
_TOGETHER = ("--set", "stages.talker.group=voice", "--set", "stages.code2wav.group=voice", "--replicas", "code2wav=2")
COMMANDS: dict[str, tuple[str, ...]] = {
    "speech": ("speech",),
    "digits": (str(_EXAMPLES / "digits" / "pipeline.yaml"),),
    "external": (_EXTERNAL,),
    "external without addresses": (_EXTERNAL, "--set", "stages.upper.addresses=[]"),
    "rehearsal": (_REHEARSAL,),
    "group": (_REHEARSAL, *_TOGETHER, "--set", "edges.1.connector=shm"),
    "rdma": (_REHEARSAL, "--set", "edges.*.connector=nixl"),
}


def _pipelines(objects: list[Manifest]) -> dict[str, str]:
    """Returns the text of the pipeline file that each Deployment's pods read, by the name of the Deployment."""
    pods = [pod for pod in all_pods(objects) if pod.owner["kind"] == "Deployment"]
    return {pod.owner["metadata"]["name"]: pod.annotations["stagemesh.dev/pipeline"] for pod in pods}


def _render(values: str, *, helm: str = "helm4") -> list[Manifest]:
    return load_objects(run_helm(helm, "template", "release", str(CHART), "--values", "-", stdin=values))


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("case", COMMANDS)
def test_pods_read_the_pipeline_that_was_rendered(case: str, helm: str, tmp_path: Path) -> None:
    values, file = tmp_path / "values.yaml", tmp_path / "pipeline.yaml"
    values.write_text(invoke("k8s", "render", *COMMANDS[case]).stdout)
    pipelines = _pipelines(_render(values.read_text(), helm=helm))
    assert "release-orchestrator" in pipelines
    generation = load_pipeline(str(values), check_models=False).generation
    for text in pipelines.values():
        file.write_text(text)
        assert load_pipeline(str(file), check_models=False).generation == generation


@pytest.mark.parametrize("helm", HELMS)
def test_text_remains_text(helm: str) -> None:
    plain = ["y", "N", "on", "Off", "null", "~", "1.10", "1e5", "0x1f", "0o17", "1_000", "1:30", "_1", ".5"]
    texts = [*plain, "two\nlines", ""]
    listed = yaml.safe_dump(texts, default_flow_style=True)
    values = invoke("k8s", "render", "speech", "--set", f"stages.thinker.options.stop={listed}").stdout
    pipeline = yaml.safe_load(_pipelines(_render(values, helm=helm))["release-thinker"])
    assert pipeline["stages"]["thinker"]["options"]["stop"] == texts


def test_the_value_of_a_variable_determines_its_type(tmp_path: Path) -> None:
    values, file = invoke("k8s", "render", _REHEARSAL).stdout, tmp_path / "pipeline.yaml"
    file.write_text(_pipelines(_render(values))["release-thinker"])
    faults = load_pipeline(str(file), variables={"FAULTS": "0.25"}).stages["thinker"].options["faults"]
    assert isinstance(faults, list)
    assert [fault["probability"] for fault in faults if isinstance(fault, dict)] == [0.25, 0.25]


def test_containers_have_the_images_that_were_rendered() -> None:
    values = yaml.safe_load(invoke("k8s", "render", "speech").stdout)
    images = {name: f"{each['repository']}:{each['tag']}" for name, each in values["images"].items()}
    thinker = f"{values['stages']['thinker']['image']['repository']}:{values['images']['stage']['tag']}"
    containers = [container for pod in all_pods(_render(yaml.dump(values))) for container in pod.containers]
    found = {container["name"]: container["image"] for container in containers}
    expected = {"orchestrator": images["orchestrator"], "thinker": thinker, "acoustic": images["stage"]}
    assert found.items() >= expected.items()
