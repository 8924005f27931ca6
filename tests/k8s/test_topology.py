"""Workloads and Services follow from the pipeline file: stages, edges and colocation groups."""

from pathlib import Path

import pytest

from stagemesh.pipeline import load_pipeline
from tests.k8s.manifests import field, pods_of
from tests.k8s.release import SPEECH, Release, at

MIB = 2**20


@pytest.fixture(scope="module")
def speech() -> Release:
    return Release()


def test_there_is_a_deployment_for_each_group_and_the_orchestrator(speech: Release) -> None:
    names = sorted(item["metadata"]["name"] for item in speech.of_kind("Deployment"))
    assert names == ["release-orchestrator", "release-thinker", "release-voice"]


def test_containers_of_a_group_share_dev_shm(speech: Release) -> None:
    mounts = [mount for container in speech.pod("voice").containers for mount in container["volumeMounts"]]
    assert [mount["name"] for mount in mounts if mount["mountPath"] == "/dev/shm"] == ["shm", "shm"]
    assert field(speech.volume("voice", "shm"), "emptyDir.medium") == "Memory"


def test_dev_shm_has_room_for_the_arenas_and_for_the_engines() -> None:
    arena = at("pipeline.stages.vocoder.data_plane.arena_bytes", 100 * MIB)
    release = Release(arena, at("stages.acoustic.shmBytes", 300 * MIB))
    # The default arena and shared memory of the engine are 64 MiB and 256 MiB.
    assert int(field(release.volume("voice", "shm"), "emptyDir.sizeLimit")) == (64 + 300 + 100 + 256) * MIB


def test_no_pod_shares_its_process_namespace(speech: Release) -> None:
    assert all("shareProcessNamespace" not in pods_of(item)[0].spec for item in speech.of_kind("Deployment"))


def test_a_pod_reads_its_pipeline_from_its_own_annotation(speech: Release) -> None:
    for name in ("orchestrator", "thinker", "voice"):
        items = field(speech.volume(name, "config"), "downwardAPI.items")
        paths = {item["path"]: item["fieldRef"]["fieldPath"] for item in items}
        assert paths["pipeline.yaml"] == "metadata.annotations['stagemesh.dev/pipeline']"


def test_the_pipeline_of_the_pods_is_that_of_the_values(speech: Release) -> None:
    assert speech.pipeline("orchestrator") == SPEECH["pipeline"]
    assert speech.pipeline("voice") == SPEECH["pipeline"]


NUMBERS = (1e-7, 1.5, 3, 268435456, 2**53 - 1, 0.1, 1e22)
TEXTS = (
    *("y", "no", "off", "1e3", "0x10", "2026-01-01", "1.10", "null", "~"),
    *("${MODEL:-a: b}", "a # b", "word " * 40 + "end"),
)


@pytest.mark.parametrize("value", [*NUMBERS, *TEXTS])
def test_values_of_the_pipeline_arrive_unchanged(value: float | str) -> None:
    pipeline = Release(at("pipeline.stages.thinker.options.value", value)).pipeline("thinker")
    arrived = pipeline["stages"]["thinker"]["options"]["value"]
    assert (type(arrived), arrived) == (type(value), value)


def test_a_reference_to_a_variable_stays_unquoted_so_that_its_value_may_be_a_number() -> None:
    pod = Release(at("pipeline.stages.thinker.options.count", "${COUNT:-3}")).pod("thinker")
    assert "count: ${COUNT:-3}\n" in pod.annotations["stagemesh.dev/pipeline"]


def test_replicas_of_one_pod_have_different_names(speech: Release) -> None:
    arguments = [argument for container in speech.pod("voice").containers for argument in container["args"]]
    names = [argument for argument in arguments if argument.startswith("--replica=")]
    assert len(names) == len(set(names)) == 2
    assert all("$(POD_NAME)" in name for name in names)


def test_all_nodes_of_a_stage_run_the_same_command_with_their_own_rank(tmp_path: Path) -> None:
    leader, worker = pods_of(Release(at("stages.thinker.multiNode.nodes", 2))["LeaderWorkerSet/release-thinker"])
    assert worker.containers[0]["args"] == leader.containers[0]["args"]
    assert not {"ports", "startupProbe", "livenessProbe", "readinessProbe"} & worker.containers[0].keys()
    file = tmp_path / "pipeline.yaml"
    for rank, pod in enumerate((leader, worker)):
        file.write_text(pod.annotations["stagemesh.dev/pipeline"])
        variables = {"LWS_WORKER_INDEX": str(rank), "LWS_LEADER_ADDRESS": "first"}
        options = load_pipeline(str(file), variables=variables, check_models=False).stages["thinker"].options
        assert (options["nnodes"], options["node_rank"], options["master_addr"]) == (2, rank, "first")


def test_a_worker_is_not_behind_the_service_of_its_stage() -> None:
    release = Release(at("stages.thinker.multiNode.nodes", 2))
    selector = release["Service/release-thinker"]["spec"]["selector"]
    leader, worker = pods_of(release["LeaderWorkerSet/release-thinker"])
    assert selector.items() <= leader.labels.items()
    assert not selector.items() <= worker.labels.items()


def test_names_begin_with_the_given_prefix() -> None:
    release = Release(at("fullnameOverride", "tts"))
    assert all(item["metadata"]["name"].split("-")[0] == "tts" for item in release.objects)
