"""Validates objects against the schemas of Kubernetes versions, and custom resources against schemas of their own.

The schemas of custom resources list the fields that the chart sets. They refuse every other field, so that a misspelt
field is found. The sources are the API references of KEDA 2.17, LeaderWorkerSet 0.7, cert-manager 1.18 and
prometheus-operator 0.85.
"""

from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate

from tests.k8s.manifests import Manifest, Render, pods_of, reference

VERSIONS = ("1.29", "1.33", "1.37")

_Schema = dict[str, Any]
_TEXT = {"type": "string", "minLength": 1}
_COUNT = {"type": "integer", "minimum": 0}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1}
_ANY_MAPPING = {"type": "object", "minProperties": 1}
_DURATION = {"type": "string", "pattern": r"^(\d+(ms|s|m|h|d|w|y))+$"}


def _mapping(required: str = "", **properties: _Schema) -> _Schema:
    """A mapping with these properties only. `required` names those that must be there, separated by spaces."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
        "minProperties": 1,
    }


def _several(item: _Schema) -> _Schema:
    return {"type": "array", "items": item, "minItems": 1}


_SELECTOR = _mapping(matchLabels=_TEXTS, matchExpressions=_several(_ANY_MAPPING))
_RELABELING = _mapping(
    sourceLabels=_several(_TEXT), separator=_TEXT, targetLabel=_TEXT, regex=_TEXT, replacement=_TEXT,
    action={"enum": ["replace", "keep", "drop", "labelmap", "labeldrop", "labelkeep", "hashmod"]},
)  # fmt: skip
_ENDPOINT = _mapping(
    "port", port=_TEXT, path={"type": "string", "pattern": "^/"}, scheme={"enum": ["http", "https"]},
    interval=_DURATION, scrapeTimeout=_DURATION, honorLabels={"type": "boolean"}, relabelings=_several(_RELABELING),
    metricRelabelings=_several(_RELABELING), tlsConfig=_ANY_MAPPING,
)  # fmt: skip
_NAMESPACES = _mapping(any={"type": "boolean"}, matchNames=_several(_TEXT))
_RULE = {
    **_mapping(
        "expr", alert=_TEXT, record=_TEXT, expr=_TEXT, labels=_TEXTS, annotations=_TEXTS,
        **{"for": _DURATION, "keep_firing_for": _DURATION},
    ),
    "oneOf": [{"required": ["alert"]}, {"required": ["record"]}],
}  # fmt: skip
_TRIGGER = _mapping(
    "type metadata", type={"const": "prometheus"}, name=_TEXT,
    metadata={**_TEXTS, "required": ["serverAddress", "query", "threshold"]},
    authenticationRef=_mapping("name", name=_TEXT, kind=_TEXT),
    metricType={"enum": ["AverageValue", "Value"]}, useCachedMetrics={"type": "boolean"},
)  # fmt: skip
_TEMPLATE = _mapping("spec", metadata=_ANY_MAPPING, spec=_ANY_MAPPING)
_SPECS: dict[tuple[str, str], _Schema] = {
    ("keda.sh/v1alpha1", "ScaledObject"): _mapping(
        "scaleTargetRef minReplicaCount maxReplicaCount triggers",
        scaleTargetRef=_mapping("name", apiVersion=_TEXT, kind=_TEXT, name=_TEXT),
        pollingInterval=_COUNT, cooldownPeriod=_COUNT, initialCooldownPeriod=_COUNT, idleReplicaCount=_COUNT,
        minReplicaCount=_COUNT, maxReplicaCount=_COUNT, triggers=_several(_TRIGGER),
        fallback=_mapping("failureThreshold replicas", failureThreshold=_COUNT, replicas=_COUNT, behavior=_TEXT),
        advanced=_mapping(
            restoreToOriginalReplicaCount={"type": "boolean"},
            horizontalPodAutoscalerConfig=_mapping(name=_TEXT, behavior=_ANY_MAPPING),
        ),
    ),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _mapping(
        "leaderWorkerTemplate",
        replicas=_COUNT,
        leaderWorkerTemplate=_mapping(
            "workerTemplate size", leaderTemplate=_TEMPLATE, workerTemplate=_TEMPLATE,
            size={"type": "integer", "minimum": 2}, restartPolicy=_TEXT,
        ),
        rolloutStrategy=_mapping(
            "type", type=_TEXT,
            rollingUpdateConfiguration=_mapping(maxUnavailable=_COUNT, maxSurge=_COUNT, partition=_COUNT),
        ),
        startupPolicy=_TEXT,
        networkConfig=_mapping("subdomainPolicy", subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
    ),
    ("cert-manager.io/v1", "Certificate"): _mapping(
        "secretName issuerRef",
        secretName=_TEXT, issuerRef=_mapping("name", name=_TEXT, kind=_TEXT, group=_TEXT),
        dnsNames=_several(_TEXT), uris=_several(_TEXT), commonName=_TEXT, duration=_DURATION, renewBefore=_DURATION,
        usages=_several({"enum": ["digital signature", "key encipherment", "server auth", "client auth"]}),
        privateKey=_mapping(algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]}, size=_COUNT,
                            rotationPolicy={"enum": ["Never", "Always"]}),
    ),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _mapping(
        "selector endpoints", selector=_SELECTOR, endpoints=_several(_ENDPOINT), namespaceSelector=_NAMESPACES,
        jobLabel=_TEXT, targetLabels=_several(_TEXT),
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): _mapping(
        "selector podMetricsEndpoints", selector=_SELECTOR, podMetricsEndpoints=_several(_ENDPOINT),
        namespaceSelector=_NAMESPACES, jobLabel=_TEXT, podTargetLabels=_several(_TEXT),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _mapping(
        "groups", groups=_several(_mapping("name rules", name=_TEXT, interval=_DURATION, rules=_several(_RULE))),
    ),
}  # fmt: skip


def check_schemas(render: Render, version: str) -> Iterator[str]:
    """Yields what the schemas of a Kubernetes version refuse. An object without a schema is a problem, too."""
    for item in render.objects:
        spec = _SPECS.get((item["apiVersion"], item["kind"]))
        if spec is None:
            yield from _check_builtin(item, reference(item), version)
            continue
        schema = _mapping(
            "apiVersion kind metadata spec", apiVersion=_TEXT, kind=_TEXT, metadata=_ANY_MAPPING, spec=spec
        )
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
