"""Workloads and Services follow from the pipeline file: stages, edges and colocation groups."""

from pathlib import Path

import pytest

from stagemesh.pipeline import load_pipeline
from tests.k8s.helm import NAMESPACE
from tests.k8s.manifests import field, pods_of, reference
from tests.k8s.release import EXTERNAL, SPEECH, Release, at

MIB = 2**20


@pytest.fixture(scope="module")
def speech() -> Release:
    return Release()


def test_a_group_is_one_pod_with_one_container_a_stage(speech: Release) -> None:
    assert [item["name"] for item in speech.pod("voice").containers] == ["acoustic", "vocoder"]


def test_a_stage_without_a_group_is_a_group_of_its_own(speech: Release) -> None:
    assert [item["name"] for item in speech.pod("thinker").containers] == ["thinker"]


def test_there_is_a_deployment_for_each_group_and_the_orchestrator(speech: Release) -> None:
    assert sorted(reference(item) for item in speech.of_kind("Deployment")) == [
        "Deployment/release-orchestrator",
        "Deployment/release-thinker",
        "Deployment/release-voice",
    ]


def test_the_port_of_a_stage_in_a_group_depends_on_its_name_alone(speech: Release) -> None:
    further = Release(at("pipeline.stages.a", {"engine": "fake", "function": "relay", "group": "voice"}))
    for release in (speech, further):
        ports = [field(release.container(name), "ports.0.containerPort") for name in ("thinker", "acoustic", "vocoder")]
        assert ports == [50051, 50131, 50150]


def test_a_stage_listens_on_the_port_that_the_values_give() -> None:
    release = Release(at("stages.vocoder.port", 50100))
    assert "--listen=0.0.0.0:50100" in release.container("vocoder")["args"]
    assert field(release["Service/release-vocoder"], "spec.ports.0.port") == 50100
    assert release.config()["dns"]["vocoder"]["port"] == 50100


def test_each_stage_has_a_headless_service_with_the_addresses_of_all_its_pods(speech: Release) -> None:
    for name in SPEECH["pipeline"]["stages"]:
        spec = speech[f"Service/release-{name}"]["spec"]
        assert (spec["clusterIP"], spec["publishNotReadyAddresses"]) == ("None", True)


def test_orchestrators_find_each_stage_by_the_name_of_its_service(speech: Release) -> None:
    hosts = {name: finder["host"] for name, finder in speech.config()["dns"].items()}
    assert hosts == {
        name: f"release-{name}.{NAMESPACE}.svc.cluster.local" for name in ("acoustic", "thinker", "vocoder")
    }


def test_the_domain_of_the_cluster_is_part_of_the_names() -> None:
    release = Release(at("clusterDomain", "k8s.example"))
    assert release.config()["dns"]["thinker"]["host"].endswith(".svc.k8s.example")


def test_the_admin_port_has_a_service_apart_from_the_clients(speech: Release) -> None:
    ports = {
        name: [port["port"] for port in speech[f"Service/release-{name}"]["spec"]["ports"]]
        for name in ("orchestrator", "admin")
    }
    assert ports == {"orchestrator": [7780], "admin": [7781, 9464]}


def test_several_orchestrators_run_by_default(speech: Release) -> None:
    assert speech["Deployment/release-orchestrator"]["spec"]["replicas"] == 2


def test_containers_of_a_group_share_dev_shm(speech: Release) -> None:
    mounts = [
        mount["name"]
        for container in speech.pod("voice").containers
        for mount in container["volumeMounts"]
        if mount["mountPath"] == "/dev/shm"
    ]
    assert mounts == ["shm", "shm"]
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
        items = {
            item["path"]: item["fieldRef"]["fieldPath"]
            for item in field(speech.volume(name, "config"), "downwardAPI.items")
        }
        assert items["pipeline.yaml"] == "metadata.annotations['stagemesh.dev/pipeline']"


def test_the_pipeline_of_the_pods_is_that_of_the_values(speech: Release) -> None:
    assert speech.pipeline("orchestrator") == SPEECH["pipeline"]
    assert speech.pipeline("voice") == SPEECH["pipeline"]


@pytest.mark.parametrize("number", [1e-7, 1.5, 3, 268435456, 2**53 - 1, 0.1, 1e22])
def test_numbers_of_the_pipeline_arrive_unchanged(number: float) -> None:
    pipeline = Release(at("pipeline.stages.thinker.options.number", number)).pipeline("thinker")
    arrived = pipeline["stages"]["thinker"]["options"]["number"]
    assert (type(arrived), arrived) == (type(number), number)


@pytest.mark.parametrize(
    "text",
    [
        "y",
        "no",
        "off",
        "1e3",
        "0x10",
        "2026-01-01",
        "1.10",
        "null",
        "~",
        "${MODEL:-a: b}",
        "a # b",
        "word " * 40 + "end",
    ],
)
def test_texts_of_the_pipeline_arrive_unchanged(text: str) -> None:
    pipeline = Release(at("pipeline.stages.thinker.options.text", text)).pipeline("thinker")
    assert pipeline["stages"]["thinker"]["options"]["text"] == text


def test_a_reference_to_a_variable_stays_unquoted_so_that_its_value_may_be_a_number() -> None:
    pod = Release(at("pipeline.stages.thinker.options.count", "${COUNT:-3}")).pod("thinker")
    assert "count: ${COUNT:-3}\n" in pod.annotations["stagemesh.dev/pipeline"]


def test_a_stage_is_started_from_its_pipeline_file(speech: Release) -> None:
    arguments = speech.container("vocoder")["args"]
    assert arguments[:4] == ["serve", "stage", "--pipeline=/etc/stagemesh/pipeline.yaml", "--stage=vocoder"]


def test_replicas_of_one_pod_have_different_names(speech: Release) -> None:
    names = [
        argument
        for container in speech.pod("voice").containers
        for argument in container["args"]
        if argument.startswith("--replica=")
    ]
    assert len(names) == len(set(names)) == 2
    assert all("$(POD_NAME)" in name for name in names)


def test_an_external_stage_is_a_reference_to_its_service() -> None:
    release = Release(EXTERNAL, at("stages.vocoder.external", {"service": "sampler", "port": 6000}))
    assert release.config()["dns"]["vocoder"] == {
        "host": f"sampler.{NAMESPACE}.svc.cluster.local",
        "port": 6000,
        "poll_s": 1,
    }
    assert [item["name"] for item in release.pod("voice").containers] == ["acoustic"]
    assert "Service/release-vocoder" not in release


def test_a_stage_that_spans_nodes_is_a_leader_worker_set() -> None:
    release = Release(at("stages.thinker.multiNode.nodes", 2))
    workload = release["LeaderWorkerSet/release-thinker"]
    leader, _ = pods_of(workload)
    assert field(workload, "spec.leaderWorkerTemplate.size") == 2
    assert leader.containers[0]["args"][:2] == ["serve", "stage"]
    assert "Deployment/release-thinker" not in release


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


def test_the_other_nodes_run_the_given_command() -> None:
    change = {"nodes": 2, "workerCommand": ["work", "--now"]}
    _, worker = pods_of(Release(at("stages.thinker.multiNode", change))["LeaderWorkerSet/release-thinker"])
    assert worker.containers[0]["command"] == ["work", "--now"]
    assert "args" not in worker.containers[0]


def test_a_worker_is_not_behind_the_service_of_its_stage() -> None:
    release = Release(at("stages.thinker.multiNode.nodes", 2))
    selector = release["Service/release-thinker"]["spec"]["selector"]
    leader, worker = pods_of(release["LeaderWorkerSet/release-thinker"])
    assert selector.items() <= leader.labels.items()
    assert not selector.items() <= worker.labels.items()


def test_the_media_service_exists_if_the_pipeline_stores_media() -> None:
    assert "Deployment/release-media" not in Release()
    release = Release(at("pipeline.media.store", "s3://bucket/media"))
    assert "Deployment/release-media" in release
    assert release.config()["media_endpoint"] == f"release-media.{NAMESPACE}.svc.cluster.local:7790"


def test_names_begin_with_the_given_prefix() -> None:
    release = Release(at("fullnameOverride", "tts"))
    assert all(item["metadata"]["name"].split("-")[0] == "tts" for item in release.objects)
