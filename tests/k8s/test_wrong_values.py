"""Wrong values are refused when the chart is rendered, with the path of the value and the remedy."""

import json
from typing import Any

import pytest

from tests.k8s.helm import CHART, HELMS, HelmError, render_text, run_helm
from tests.k8s.release import EXTERNAL, SPEECH, Release, at, merged
from tests.k8s.test_stage_settings import NIXL_EDGE

MIB = 2**20
SCALED = {"enabled": True, "minReplicas": 1, "maxReplicas": 4, "prometheus": {"address": "http://prometheus:9090"}}
LIMIT = {"limits": {"memory": "32Mi"}}
PARALLEL = at("pipeline.stages.thinker.options.tensor_parallel_size", 4)
SAMPLER = {"service": "sampler", "port": 1}
JOBS = {**at("pipeline.media.store", "s3://bucket/media"), **at("jobs.enabled", True)}
SHARED = {
    "volumes": [{"name": "media", "persistentVolumeClaim": {"claimName": "media"}}],
    "volumeMounts": [{"name": "media", "mountPath": "/media"}],
}
LORA = {"name": "lora", "persistentVolumeClaim": {"claimName": "weights"}}
DIFFUSION = {"engine": "diffusion", "options": {"parallel": {"cfg": 2, "ulysses": 2, "hsdp": 2}}}
HALF = {"limits": {"memory": "300Mi"}}
EDGES = SPEECH["pipeline"]["edges"]

# What is changed in SPEECH, and the parts of the message: the path of the value and the remedy.
RULES: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "no pipeline": (
        [{"pipeline": None}],
        [
            "pipeline has no stages",
            "set it to the content of a pipeline file, as `stagemesh k8s render FILE` prints it",
        ],
    ),
    "no replicas of a needed stage": (
        [at("stages.thinker.replicas", 0)],
        ["stages.thinker.replicas is 0, but the pipeline needs stage thinker", "set at least 1"],
    ),
    "no replicas of a needed group": (
        [at("groups.voice.replicas", 0)],
        ["groups.voice.replicas is 0, but the pipeline needs stage acoustic and vocoder", "set at least 1"],
    ),
    "no replicas in the pipeline": (
        [at("pipeline.stages.thinker.replicas", 0)],
        ["pipeline.stages.thinker.replicas", "0"],
    ),
    "different replicas in one pod": (
        [at("pipeline.stages.vocoder.replicas", 2)],
        ["pipeline.stages.vocoder.replicas is 2", "group voice has 1", "the same number"],
    ),
    "stage that is not divided yet": (
        [at("pipeline.stages.thinker.split", {"prefill": 1, "decode": 2})],
        ["pipeline.stages.thinker.split is set", "write the values by `stagemesh k8s render`"],
    ),
    "two stages on one port": (
        [at("stages.vocoder.port", 50131)],
        ["stages.vocoder.port is 50131, which stage acoustic of the same pod uses", "set another port"],
    ),
    "arena above the memory limit": (
        [at("pipeline.stages.thinker.data_plane.arena_bytes", 64 * MIB), at("stages.thinker.resources", LIMIT)],
        [
            "pipeline.stages.thinker.data_plane.arena_bytes is 67108864",
            "stages.thinker.resources.limits.memory is 32Mi",
            "raise the limit, or set a smaller arena",
        ],
    ),
    "default arena above the memory limit": (
        [at("stages.thinker.resources", LIMIT)],
        ["pipeline.stages.thinker.data_plane.arena_bytes is 67108864", "raise the limit, or set a smaller arena"],
    ),
    "GPU edge without a GPU": (
        [
            at("pipeline.edges", NIXL_EDGE),
            at("stages.thinker.rdma", {"enabled": True, "resource": "rdma/hca", "gpuDirect": True}),
        ],
        [
            "stages.thinker.rdma.gpuDirect is true, but the stage has no GPU",
            "set stages.thinker.gpus, or remove gpuDirect",
        ],
    ),
    "GPU transport without a GPU": (
        [at("pipeline.edges", NIXL_EDGE), at("stages.thinker.ucx", {"UCX_TLS": "rc,cuda_copy"})],
        [
            "stages.thinker.ucx.UCX_TLS",
            "the stage has no GPU",
            "set stages.thinker.gpus, or remove the transports of CUDA",
        ],
    ),
    "GPU twice": (
        [at("stages.thinker", {"gpus": 1, "resources": {"limits": {"nvidia.com/gpu": "1"}}})],
        ["stages.thinker.resources.limits has nvidia.com/gpu, which stages.thinker.gpus sets", "keep one of them"],
    ),
    "RDMA of a GPU without RDMA": (
        [at("stages.thinker", {"gpus": 1, "rdma": {"gpuDirect": True}})],
        ["stages.thinker.rdma.gpuDirect is true, but stages.thinker.rdma.enabled is false", "or remove gpuDirect"],
    ),
    "shared memory above the memory limit": (
        [at("stages.thinker", {"shmBytes": 512 * MIB, "resources": {"limits": {"memory": "256Mi"}}})],
        [
            "stages.thinker.shmBytes is 536870912",
            "stages.thinker.resources.limits.memory is 256Mi",
            "set less shared memory",
        ],
    ),
    "fallback above maximum": (
        [at("stages.thinker.autoscaling", {**SCALED, "fallbackReplicas": 5})],
        ["stages.thinker.autoscaling.fallbackReplicas is 5, which is above stages.thinker.autoscaling.maxReplicas, 4"],
    ),
    "fewer GPUs than ranks": (
        [PARALLEL, at("stages.thinker.gpus", 2)],
        ["stages.thinker.gpus", "need 4", "set stages.thinker.gpus, or multiNode.nodes"],
    ),
    "unknown colocation group": (
        [at("groups.speakers.surge", 2)],
        ["groups.speakers is not a colocation group of the pipeline", "its groups are thinker, voice"],
    ),
    "unknown stage": (
        [at("stages.talker.gpus", 1)],
        ["stages.talker is not a stage of the pipeline", "its stages are acoustic, thinker, vocoder"],
    ),
    "setting of the pod for one of its stages": (
        [at("stages.vocoder.nodeSelector", {"gpu": "h200"})],
        ["stages.vocoder.nodeSelector is a setting of the pod", "set groups.voice.nodeSelector"],
    ),
    "shm between groups": (
        [at("pipeline.edges", [{**EDGES[0], "connector": "shm"}, EDGES[1]])],
        [
            "pipeline.edges[0].connector is shm",
            "thinker and acoustic are in the groups thinker and voice",
            "give both stages the same group, or set connector: auto",
        ],
    ),
    "edge to an unknown stage": (
        [at("pipeline.edges", [*EDGES, {"from": "thinker", "to": "talker"}])],
        ["pipeline.edges[2].to", "talker", "its stages are acoustic, thinker, vocoder"],
    ),
    "edge to the client's input": (
        [at("pipeline.edges", [*EDGES, {"from": "thinker", "to": "@input"}])],
        ["pipeline.edges[2].to", "@input", "its stages are acoustic, thinker, vocoder"],
    ),
    "RDMA without a device": (
        [at("pipeline.edges", NIXL_EDGE), at("stages.thinker.rdma.enabled", True)],
        ["stages.thinker.rdma.resource is not set", "name the resource of the RDMA device plug-in"],
    ),
    "RDMA without an edge": (
        [
            at("pipeline.edges", [{**edge, "connector": "grpc"} for edge in EDGES]),
            at("stages.thinker.rdma", {"enabled": True, "resource": "rdma/hca"}),
        ],
        ["stages.thinker.rdma.enabled is true, but no edge of the stage has connector nixl", "remove rdma"],
    ),
    "TLS without certificates": (
        [at("tls.enabled", True)],
        ["tls.enabled is true, but tls.secrets.orchestrator is not set", "set it, or tls.issuer.name"],
    ),
    "TLS with one certificate": (
        [at("tls", {"enabled": True, "secrets": {"orchestrator": "tls-o"}})],
        ["tls.enabled is true, but tls.secrets.stages is not set", "set it, or tls.issuer.name"],
    ),
    "TLS without a certificate for the test of the release": (
        [at("tls", {"enabled": True, "secrets": {"orchestrator": "tls-o", "stages": "tls-s"}})],
        ["tls.enabled is true, but tls.secrets.test is not set", "set it, or tls.issuer.name"],
    ),
    "port of health checks": (
        [at("tls", {"enabled": True, "issuer": {"name": "ca"}}), at("stages.vocoder.port", 8090)],
        ["stages.vocoder.port is 8090", "answers health checks", "set another port, or leave it out"],
    ),
    "tokens without tls": (
        [at("tls.tokens.secret", "callers")],
        ["tls.tokens is set, but tls.enabled is false", "set tls.enabled: true, or remove the tokens"],
    ),
    "keys of tokens without an audience": (
        [at("tls", {"enabled": True, "issuer": {"name": "ca"}, "tokens": {"keys": "https://id/keys", "issuer": "id"}})],
        ["tls.tokens.keys and tls.tokens.audience belong together", "set both, or neither"],
    ),
    "forwarded tokens that nobody accepts": (
        [
            at("tls", {"enabled": True, "issuer": {"name": "ca"}}),
            at("gateway", {"enabled": True, "forwardTokens": True}),
        ],
        [
            "gateway.forwardTokens is true, but tls.tokens names no tokens",
            "set tls.tokens.secret or tls.tokens.keys, or gateway.forwardTokens: false",
        ],
    ),
    "no certificate of the gateways": (
        [
            at("tls", {"enabled": True, "secrets": {"orchestrator": "tls-o", "stages": "tls-s", "test": "tls-t"}}),
            at("gateway.enabled", True),
        ],
        ["tls.enabled is true, but tls.secrets.gateway is not set", "set it, or tls.issuer.name"],
    ),
    "ingress without gateways": (
        [at("gateway.ingress", {"enabled": True, "host": "ai.example.com"})],
        ["gateway.ingress.enabled is true, but gateway.enabled is false", "set gateway.enabled: true"],
    ),
    "ingress without a host": (
        [at("gateway", {"enabled": True, "ingress": {"enabled": True}})],
        ["gateway.ingress.host is not set", "set the host name at which clients reach the gateways"],
    ),
    "no certificate of the job servers": (
        [
            JOBS,
            at(
                "tls", {"enabled": True, "secrets": {**dict.fromkeys(("orchestrator", "stages", "media", "test"), "t")}}
            ),
        ],
        ["tls.enabled is true, but tls.secrets.jobs is not set", "set it, or tls.issuer.name"],
    ),
    "jobs without a store": (
        [at("jobs.enabled", True)],
        [
            "jobs.enabled is true, but pipeline.media.store is not set",
            "set pipeline.media.store, or jobs.enabled: false",
        ],
    ),
    "variable in the store of jobs": (
        [JOBS, at("pipeline.media.storage_options", {"s3": {"secret": "${STORE_SECRET}"}})],
        [
            "pipeline.media has a variable, which job servers do not know",
            "write the value, or take credentials from jobs.env",
        ],
    ),
    "several job servers with a SQLite file": (
        [JOBS, at("jobs.replicas", 2)],
        [
            "jobs.replicas is 2, but only one pod can use a SQLite file",
            "set jobs.databaseSecret",
            "or jobs.replicas: 1",
        ],
    ),
    "two databases of jobs": (
        [JOBS, at("jobs", {"databaseSecret": "database", "sqlite": {"claim": "jobs"}})],
        ["jobs.databaseSecret and jobs.sqlite.claim are both set", "keep one of them"],
    ),
    "folder of media that job servers do not have": (
        [at("pipeline.media.store", "/media"), at("jobs.enabled", True), {"media": SHARED, "stageDefaults": SHARED}],
        ["jobs.volumeMounts mounts nothing at pipeline.media.store", "or use an object store"],
    ),
    "volume of job servers with a name of the chart": (
        [at("jobs.volumes", [{"name": "database", "emptyDir": {}}])],
        ["jobs.volumes[0].name", "database", "choose another name"],
    ),
    "mount of job servers at the path of their database": (
        [at("jobs", {"volumes": [LORA], "volumeMounts": [{"name": "lora", "mountPath": "/var/lib/stagemesh/jobs"}]})],
        ["jobs.volumeMounts[0].mountPath", "another volume is mounted; choose another path"],
    ),
    "certificates without TLS": (
        [at("tls.secrets.orchestrator", "tls-o")],
        ["tls.secrets.orchestrator is set, but tls.enabled is false", "set tls.enabled: true, or remove the secret"],
    ),
    "issuer without TLS": (
        [at("tls.issuer.name", "ca")],
        ["tls.issuer.name is set, but tls.enabled is false", "set tls.enabled: true, or remove the issuer"],
    ),
    "issuer and certificates": (
        [at("tls", {"enabled": True, "issuer": {"name": "ca"}, "secrets": {"stages": "tls-s"}})],
        ["tls.secrets.stages and tls.issuer.name are both set", "keep the issuer or the secrets"],
    ),
    "drain longer than the grace period": (
        [at("stages.thinker", {"drainSeconds": 300, "terminationGracePeriodSeconds": 100})],
        ["stages.thinker.terminationGracePeriodSeconds", "100", "330"],
    ),
    "drain of orchestrators longer than the grace period": (
        [at("orchestrator", {"drainSeconds": 300, "terminationGracePeriodSeconds": 100})],
        ["orchestrator.terminationGracePeriodSeconds", "100", "330"],
    ),
    "minimum above maximum": (
        [at("stages.thinker.autoscaling", {**SCALED, "minReplicas": 5})],
        [
            "stages.thinker.autoscaling.minReplicas is 5, which is above stages.thinker.autoscaling.maxReplicas, 4",
            "lower the minimum, or raise the maximum",
        ],
    ),
    "minimum above maximum by default": (
        [at("stageDefaults.autoscaling", {**SCALED, "minReplicas": 5})],
        ["stageDefaults.autoscaling.minReplicas is 5", "lower the minimum, or raise the maximum"],
    ),
    "scaled to nothing": (
        [at("groups.voice.autoscaling", {**SCALED, "minReplicas": 0})],
        ["groups.voice.autoscaling.minReplicas is 0", "set at least 1"],
    ),
    "autoscaler without a signal": (
        [at("groups.voice.autoscaling", {**SCALED, "queuedSeconds": 0, "playoutAtRisk": 0, "inFlight": 0})],
        ["groups.voice.autoscaling.queuedSeconds", "set at least one"],
    ),
    "KEDA without Prometheus": (
        [at("stageDefaults.autoscaling", {"enabled": True})],
        [
            "stageDefaults.autoscaling.kind is keda, but stageDefaults.autoscaling.prometheus.address is not set",
            "set it, such as http://",
        ],
    ),
    "warm tier that cannot sleep": (
        [at("stages.thinker.warm.replicas", 1), at("pipeline.stages.thinker.options.enable_sleep_mode", None)],
        ["stages.thinker.warm.replicas is 1, but stage thinker cannot sleep", "enable_sleep_mode: true"],
    ),
    "two model caches": (
        [at("stages.thinker.modelCache", {"existingClaim": "weights", "hostPath": "/srv"})],
        ["stages.thinker.modelCache has existingClaim and hostPath", "keep one of them"],
    ),
    "init container without a cache": (
        [at("stages.thinker.modelCache", {"none": True, "init": {"image": "fetch:1"}})],
        ["stages.thinker.modelCache.init has an image, but there is no folder", "set one of existingClaim"],
    ),
    "external stage without a service": (
        [EXTERNAL],
        ["stages.vocoder.external is not set", "set its service and port"],
    ),
    "external settings of an internal stage": (
        [at("stages.thinker.external", SAMPLER)],
        ["stages.thinker.external is only for stages with `engine: external`", "remove it"],
    ),
    "settings of an external stage": (
        [EXTERNAL, at("stages.vocoder", {"gpus": 1, "external": SAMPLER})],
        ["stages.vocoder.gpus has no effect", "remove it"],
    ),
    "stage of several nodes in a group": (
        [at("stages.acoustic.multiNode", {"nodes": 2, "workerCommand": ["work"]})],
        ["stages.acoustic.multiNode.nodes is 2, but the stage shares a pod", "remove it from the group"],
    ),
    "stage of several nodes without a command": (
        [at("pipeline.stages.thinker.engine", "function"), at("stages.thinker.multiNode.nodes", 2)],
        ["stages.thinker.multiNode.workerCommand is not set"],
    ),
    "reserved name": (
        [at("pipeline.stages.media", {"engine": "fake"})],
        ["pipeline.stages.media", "choose a name other than orchestrator, admin, media, gateway, jobs and test"],
    ),
    "reserved end of a name": (
        [at("pipeline.stages.acoustic.group", "voice-warm")],
        ["pipeline.stages.acoustic.group", "voice-warm", "without the end -warm"],
    ),
    "group named like another stage": (
        [at("pipeline.stages.thinker.group", "acoustic")],
        ["pipeline.stages.thinker.group", "the name of a stage outside the group", "choose another name"],
    ),
    "name that is not a DNS label": (
        [at("pipeline.stages.Talker", {"engine": "fake"})],
        ["pipeline.stages.Talker", "use at most 30 lower-case letters, digits and '-'"],
    ),
    "names too long": (
        [at("fullnameOverride", "a" * 60)],
        ["fullnameOverride", "more than 63 characters", "set a shorter fullnameOverride"],
    ),
    "variable in a value that the chart reads": (
        [at("pipeline.stages.thinker.engine", "${ENGINE}")],
        ["pipeline.stages.thinker.engine", "the chart reads this value itself", "write the value"],
    ),
    "repeated variable": (
        [at("stages.thinker.env", [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}])],
        ["stages.thinker.env has the variable A more than once", "keep one"],
    ),
    "mount without a volume": (
        [at("stages.thinker.volumeMounts", [{"name": "lora", "mountPath": "/lora"}])],
        ["stages.thinker.volumeMounts[0].name", "lora", "has no volume of this name; add it there"],
    ),
    "volume with a name of the chart": (
        [at("stages.thinker.volumes", [{"name": "shm", "emptyDir": {}}])],
        ["stages.thinker.volumes[0].name", "shm", "choose another name"],
    ),
    "mount at a path of the chart": (
        [at("stages.thinker", {"volumes": [LORA], "volumeMounts": [{"name": "lora", "mountPath": "/tmp/"}]})],
        ["stages.thinker.volumeMounts[0].mountPath", "/tmp/", "another volume is mounted; choose another path"],
    ),
    "folder of media that pods do not share": (
        [at("pipeline.media.store", "/media")],
        ["media.volumeMounts mounts nothing at pipeline.media.store", "or use an object store"],
    ),
    "label of the chart": (
        [at("commonLabels", {"app.kubernetes.io/name": "other"})],
        ["commonLabels has the label app.kubernetes.io/name, which the chart sets itself", "remove it"],
    ),
    "port on nodes without a Service on nodes": (
        [at("orchestrator.service.nodePort", 30780)],
        ["orchestrator.service.nodePort is set, but a Service of type ClusterIP", "set type NodePort or LoadBalancer"],
    ),
    "variable that YAML would break into lines": (
        [at("pipeline.stages.thinker.options.text", "${TEXT:-" + "many words " * 20 + "}")],
        ["pipeline has a variable ${NAME:-default} that YAML breaks into two lines", "shorten the text"],
    ),
    "two monitors": (
        [at("monitoring", {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}})],
        ["monitoring.podMonitor.enabled and monitoring.serviceMonitor.enabled are both true", "keep one of them"],
    ),
    "stage outside of the ports of stages": (
        [at("stages.thinker.port", 6000)],
        [
            "stages.thinker.port is 6000, outside networkPolicy.stagePortRange",
            "50051-50150",
            "set a port of the range, or widen the range",
        ],
    ),
    "default port outside of the ports of stages": (
        [at("networkPolicy.stagePortRange", "50051-50051")],
        ["stages.acoustic.port is 50131, outside networkPolicy.stagePortRange"],
    ),
    "ports of UCX that are ports of stages": (
        [at("networkPolicy.ucxPortRange", "50100-50200")],
        [
            "networkPolicy.ucxPortRange",
            "50100-50200",
            "overlaps networkPolicy.stagePortRange",
            "50051-50150",
            "move one of them",
        ],
    ),
    "ports of stages in the wrong order": (
        [at("networkPolicy.stagePortRange", "50150-50051")],
        ["networkPolicy.stagePortRange", "50150-50051", "FIRST-LAST"],
    ),
    "external stage that no policy reaches": (
        [EXTERNAL, at("pipeline.stages.vocoder.addresses", ["vocoder.example.com:6000"])],
        [
            "networkPolicy.externalStages admits only pods of the namespace",
            "vocoder.example.com:6000 is outside of it",
            "add a peer with its namespaceSelector or ipBlock",
        ],
    ),
    "external Service that no policy reaches": (
        [EXTERNAL, at("stages.vocoder.external", {"service": "vocoder.other.svc.cluster.local", "port": 6000})],
        ["vocoder.other.svc.cluster.local:6000 is outside of it", "add a peer with its namespaceSelector"],
    ),
    "CUDA without a GPU": (
        [at("pipeline.stages.thinker.options.device", "cuda")],
        [
            "pipeline.stages.thinker.options.device is cuda, but the stage has no GPU",
            "set stages.thinker.gpus, or device: cpu",
        ],
    ),
    "fewer GPUs than ranks of diffusion": (
        [at("pipeline.stages.thinker", DIFFUSION), at("stages.thinker.gpus", 3)],
        [
            "stages.thinker.gpus gives a replica 3 GPUs",
            "need 4",
            "parallel",
            "set stages.thinker.gpus, or multiNode.nodes",
        ],
    ),
    "arenas of a pod above its memory limits": (
        [at("stages", {"acoustic": {"resources": HALF}, "vocoder": {"resources": HALF}})],
        [
            "the pod with acoustic and vocoder need 671088640 bytes",
            "stages.acoustic.resources.limits.memory and stages.vocoder.resources.limits.memory permit only 629145600",
            "raise a limit, or set smaller arenas or shmBytes",
        ],
    ),
    "request above the limit": (
        [at("stages.thinker.resources", {"requests": {"cpu": "1500m"}, "limits": {"cpu": 1}})],
        [
            "stages.thinker.resources.requests.cpu is 1500m, above stages.thinker.resources.limits.cpu, 1",
            "lower the request, or raise the limit",
        ],
    ),
    "request of orchestrators above the limit": (
        [at("orchestrator.resources", {"requests": {"memory": "3Gi"}})],
        ["orchestrator.resources.requests.memory is 3Gi, above orchestrator.resources.limits.memory, 2Gi"],
    ),
    "request of an init container above the limit": (
        [at("groups.voice.modelCache.init.resources", {"requests": {"memory": "2G"}, "limits": {"memory": "1Gi"}})],
        ["groups.voice.modelCache.init.resources.requests.memory is 2G, above"],
    ),
    "variable that the arguments need": (
        [at("stages.thinker.env", [{"name": "POD_NAME", "value": "x"}])],
        ["stages.thinker.env has the variable POD_NAME", "remove it"],
    ),
    "variable that the mounts need": (
        [at("orchestrator.env", [{"name": "STAGEMESH_HOME", "value": "/x"}])],
        ["orchestrator.env has the variable STAGEMESH_HOME", "remove it"],
    ),
    "variable that the policies need": (
        [at("stages.thinker.env", [{"name": "UCX_TCP_PORT_RANGE", "value": "1-2"}])],
        ["stages.thinker.env has the variable UCX_TCP_PORT_RANGE", "set networkPolicy.ucxPortRange instead"],
    ),
    "setting of UCX that the policies need": (
        [at("stages.thinker.ucx.UCX_TCP_PORT_RANGE", "20000-20010")],
        ["stages.thinker.ucx has the variable UCX_TCP_PORT_RANGE", "set networkPolicy.ucxPortRange instead"],
    ),
    "repeated variable of an init container": (
        [at("groups.voice.modelCache.init.env", [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}])],
        ["groups.voice.modelCache.init.env has the variable A more than once", "keep one"],
    ),
    "init container named like a stage": (
        [at("groups.voice.initContainers", [{"name": "vocoder", "image": "x:1"}])],
        ["groups.voice.initContainers[0].name", "vocoder", "another container of the pod", "choose another name"],
    ),
    "init container named like that of the chart": (
        [at("groups.voice.initContainers", [{"name": "model-cache", "image": "x:1"}])],
        ["groups.voice.initContainers[0].name", "model-cache", "choose another name"],
    ),
    "port of nodes out of range": (
        [at("orchestrator.service", {"type": "NodePort", "nodePort": 80})],
        ["orchestrator.service.nodePort is 80", "from 30000 to 32767, or 0"],
    ),
    "certificates that are renewed too early": (
        [at("tls", {"enabled": True, "issuer": {"name": "ca"}, "duration": "24h", "renewBefore": "1440m"})],
        ["tls.renewBefore is 1440m, but tls.duration is only 24h", "renew later, or let certificates last longer"],
    ),
    "scrape that takes longer than the interval": (
        [at("monitoring.serviceMonitor", {"enabled": True, "interval": "1s", "scrapeTimeout": "1500ms"})],
        ["monitoring.serviceMonitor.scrapeTimeout is 1500ms, above monitoring.serviceMonitor.interval, 1s", "lower it"],
    ),
    "stage with the name of the liveness service": (
        [at("pipeline.stages.liveness", {"engine": "fake"})],
        ["pipeline.stages.liveness has the name of the health service", "rename the stage"],
    ),
    "ports of UCX in the wrong order": (
        [at("networkPolicy.ucxPortRange", "30010-30000")],
        ["networkPolicy.ucxPortRange", "30010-30000", "FIRST-LAST"],
    ),
}
# What is changed in SPEECH, and the path by which the schema names the value. Helm 3 and 4 spell it differently.
TYPES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown key": (at("orchestartor.replicas", 2), ["orchestartor"]),
    "unknown key of a stage": (at("stages.thinker.replica", 2), ["stages", "thinker", "replica"]),
    "unknown key of a group": (at("groups.voice.gpus", 2), ["groups", "voice", "gpus"]),
    "unknown key far below": (
        at("stages.thinker.modelCache.init.script", "x"),
        ["thinker", "modelCache", "init", "script"],
    ),
    "text for a number": (at("orchestrator.replicas", "two"), ["orchestrator", "replicas", "integer"]),
    "fraction of a replica": (at("stages.thinker.replicas", 1.5), ["stages", "thinker", "replicas", "integer"]),
    "negative number": (at("stages.thinker.drainSeconds", -1), ["stages", "thinker", "drainSeconds", "0"]),
    "number for a label": (at("commonLabels.version", 2), ["commonLabels", "version", "string"]),
    "unknown policy": (at("images.stage.pullPolicy", "Sometimes"), ["images", "stage", "pullPolicy"]),
    "shortened digest": (at("images.stage.digest", "sha256:1234"), ["images", "stage", "digest"]),
    "port out of range": (at("stages.thinker.port", 70_000), ["stages", "thinker", "port"]),
    "Prometheus without a scheme": (
        at("stageDefaults.autoscaling.prometheus.address", "prometheus:9090"),
        ["stageDefaults", "autoscaling", "prometheus", "address"],
    ),
    "unknown autoscaler": (at("stageDefaults.autoscaling.kind", "knative"), ["stageDefaults", "autoscaling", "kind"]),
    "malformed quantity": (
        at("stages.thinker.resources.limits", {"memory": "2GB"}),
        ["thinker", "resources", "limits", "memory"],
    ),
    "list for a mapping": (at("stages", [{"name": "thinker"}]), ["stages"]),
    "stage without an engine": (at("pipeline.stages.spare", {"model": "x"}), ["pipeline", "stages", "spare", "engine"]),
    "unknown key of the pipeline": (at("pipeline.output", {"text": "thinker"}), ["pipeline", "output"]),
    "unknown key of a stage of the pipeline": (
        at("pipeline.stages.thinker.gruop", "voice"),
        ["pipeline", "stages", "thinker", "gruop"],
    ),
    "group of an external stage": (
        merged(EXTERNAL, at("pipeline.stages.vocoder.group", "voice")),
        ["pipeline", "stages", "vocoder", "group"],
    ),
    "unknown key of a data plane": (
        at("pipeline.stages.thinker.data_plane.arena_size", 1),
        ["pipeline", "stages", "thinker", "data_plane", "arena_size"],
    ),
    "unknown key of an edge": (
        at("pipeline.edges", [{**EDGES[0], "conector": "shm"}]),
        ["pipeline", "edges", "0", "conector"],
    ),
    "unknown way of joining": (at("pipeline.stages.thinker.join", "some"), ["pipeline", "stages", "thinker", "join"]),
    "unknown rows of an edge": (
        at("pipeline.edges", [{**EDGES[0], "tokens": "first"}]),
        ["pipeline", "edges", "0", "tokens"],
    ),
    "unknown key of an output": (
        at("pipeline.outputs.file", {"from": "vocoder", "type": "audio/ogg"}),
        ["pipeline", "outputs", "file", "type"],
    ),
    "unknown limit": (at("pipeline.limits.in_flight", 3), ["pipeline", "limits", "in_flight"]),
    "unknown key of the media": (at("pipeline.media.bucket", "b"), ["pipeline", "media", "bucket"]),
    "rule for every host": (at("networkPolicy.stageEgress", [{"to": []}]), ["networkPolicy", "stageEgress", "to"]),
    "rule for every port": (
        at("networkPolicy.mediaEgress", [{"ports": []}]),
        ["networkPolicy", "mediaEgress", "ports"],
    ),
    "job server that runs no job": (at("jobs.maxRunning", 0), ["jobs", "maxRunning", "1"]),
    "lease that ends at once": (at("jobs.leaseSeconds", 0.5), ["jobs", "leaseSeconds", "1"]),
    "rule for everything": (at("networkPolicy.orchestratorEgress", [{}]), ["networkPolicy", "orchestratorEgress"]),
    "lifetime that cert-manager cannot read": (at("tls.duration", "90d"), ["tls", "duration"]),
    "orchestrators without replicas": (at("orchestrator.replicas", 0), ["orchestrator", "replicas", "1"]),
    "inline secret": (
        at("stages.thinker.envFrom", [{"secret": {"HF_TOKEN": "x"}}]),
        ["stages", "thinker", "envFrom", "secret"],
    ),
}


def refusal(helm: str, *changes: dict[str, Any]) -> str:
    """Returns the message with which helm refuses the changed values."""
    with pytest.raises(HelmError) as refused:
        render_text(merged(SPEECH, *changes), helm=helm)
    return str(refused.value)


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("name", RULES)
def test_wrong_values_are_refused_with_the_remedy(name: str, helm: str) -> None:
    changes, parts = RULES[name]
    message = refusal(helm, *changes)
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("name", TYPES)
def test_values_that_the_schema_forbids_are_refused_with_their_path(name: str, helm: str) -> None:
    change, parts = TYPES[name]
    message = refusal(helm, change)
    assert "values don't meet the specifications of the schema" in message
    assert [part for part in parts if part not in message] == [], message


def test_the_values_that_the_wrong_ones_start_from_are_right() -> None:
    assert Release().objects
    assert Release(EXTERNAL, at("stages.vocoder.external", {"service": "sampler", "port": 6000})).objects
    assert Release(PARALLEL, at("stages.thinker.gpus", 4)).objects
    assert Release(at("stages.thinker", {"drainSeconds": 300, "terminationGracePeriodSeconds": 330})).objects
    assert Release(at("stages.thinker.autoscaling", {**SCALED, "minReplicas": 4})).objects
    # 64 MiB of arena and 256 MiB of shared memory.
    assert Release(at("stages.thinker.resources", {"limits": {"memory": "320Mi"}})).objects
    assert Release(at("stages.acoustic.resources", HALF)).objects
    assert Release(at("pipeline.stages.thinker", DIFFUSION), at("stages.thinker.gpus", 4)).objects
    assert Release(at("stages.thinker.resources", {"requests": {"cpu": "1000m"}, "limits": {"cpu": 1}})).objects
    assert Release(EXTERNAL, at("pipeline.stages.vocoder.addresses", ["sampler.models.svc:6000"])).objects


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("name", ["1s", "my.speech"])
def test_a_release_whose_name_cannot_begin_the_name_of_a_service_is_refused(name: str, helm: str) -> None:
    def render_as(values: dict[str, Any]) -> str:
        return run_helm(helm, "template", name, str(CHART), "--values", "-", stdin=json.dumps(values))

    with pytest.raises(HelmError, match=f"{name}.*set fullnameOverride to a name of lower-case letters"):
        render_as(SPEECH)
    assert "speech-orchestrator" in render_as(merged(SPEECH, at("fullnameOverride", "speech")))
