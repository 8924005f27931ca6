"""Checks single values: enumerations, quantities and nulls."""

import re
from collections.abc import Iterator
from decimal import Decimal

from tests.k8s.manifests import Render, reference, walk

_POD = r"(^|.*\.)spec\."
_LABEL_TERM = r".*(?<!nodeSelectorTerms\.\d\.)matchExpressions\.\d+\.operator"
# The allowed values by the kind of the object (empty: any) and the path of the field.
_ENUMERATIONS: tuple[tuple[str, str, set[str]], ...] = (
    ("", r".*\.imagePullPolicy", {"Always", "IfNotPresent", "Never"}),
    ("", _POD + "restartPolicy", {"Always", "OnFailure", "Never"}),
    ("", _POD + "dnsPolicy", {"ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"}),
    ("", r".*\.terminationMessagePolicy", {"File", "FallbackToLogsOnError"}),
    ("", r".*\.ports\.\d+\.protocol", {"TCP", "UDP", "SCTP"}),
    ("", r".*\.emptyDir\.medium", {"", "Memory", "HugePages"}),
    ("", r".*\.hostPath\.type", {"", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"}),
    ("", r".*\.mountPropagation", {"None", "HostToContainer", "Bidirectional"}),
    ("", r".*\.seccompProfile\.type", {"RuntimeDefault", "Localhost"}),
    ("", r".*\.whenUnsatisfiable", {"DoNotSchedule", "ScheduleAnyway"}),
    ("", r".*\.node(Affinity|Taints)Policy", {"Honor", "Ignore"}),
    ("", r".*\.tolerations\.\d+\.operator", {"Equal", "Exists"}),
    ("", r".*\.tolerations\.\d+\.effect", {"NoSchedule", "PreferNoSchedule", "NoExecute"}),
    ("", r".*nodeSelectorTerms\.\d+\.matchExpressions\.\d+\.operator",
     {"In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"}),
    ("", _LABEL_TERM, {"In", "NotIn", "Exists", "DoesNotExist"}),
    ("", r".*accessModes\.\d+", {"ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"}),
    ("Deployment", r"spec\.strategy\.type", {"RollingUpdate", "Recreate"}),
    ("Service", r"spec\.type", {"ClusterIP", "NodePort", "LoadBalancer", "ExternalName"}),
    ("Service", r"spec\.sessionAffinity", {"None", "ClientIP"}),
    ("Service", r"spec\.ipFamilyPolicy", {"SingleStack", "PreferDualStack", "RequireDualStack"}),
    ("NetworkPolicy", r"spec\.policyTypes\.\d+", {"Ingress", "Egress"}),
    ("HorizontalPodAutoscaler", r"spec\.metrics\.\d+\.type",
     {"ContainerResource", "External", "Object", "Pods", "Resource"}),
    ("HorizontalPodAutoscaler", r"spec\.metrics\.\d+\..*\.target\.type", {"AverageValue", "Utilization", "Value"}),
    ("HorizontalPodAutoscaler", r".*behavior\.scale(Up|Down)\.selectPolicy", {"Max", "Min", "Disabled"}),
    ("HorizontalPodAutoscaler", r".*behavior\.scale(Up|Down)\.policies\.\d+\.type", {"Pods", "Percent"}),
    ("PodDisruptionBudget", r"spec\.unhealthyPodEvictionPolicy", {"IfHealthyBudget", "AlwaysAllow"}),
    ("LeaderWorkerSet", r"spec\.startupPolicy", {"LeaderCreated", "LeaderReady"}),
    ("LeaderWorkerSet", r"spec\.leaderWorkerTemplate\.restartPolicy",
     {"Default", "None", "RecreateGroupAfterStart", "RecreateGroupOnPodRestart"}),
    ("LeaderWorkerSet", r"spec\.rolloutStrategy\.type", {"RollingUpdate"}),
)  # fmt: skip
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?")
_QUANTITIES = re.compile(
    r".*\.resources\.(limits|requests)\..+|.*\.emptyDir\.sizeLimit|.*\.target\.(averageValue|value)"
)
_SCALES = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12), "P": Decimal(10**15),
    "E": Decimal(10**18), "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40),
    "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip


def parse_quantity(value: object) -> Decimal | None:
    """Returns a quantity such as 500m, 2Gi or 1e3 as a number, or None if it is not one."""
    parts = _QUANTITY.fullmatch(str(value))
    if parts is None:
        return None
    number, suffix = parts[1], parts[2] or ""
    return Decimal(number) * _SCALES[suffix] if suffix in _SCALES else Decimal(number + suffix)


def check_scalars(render: Render) -> Iterator[str]:
    """Yields unknown values of enumerations, malformed quantities, and nulls."""
    for item in render.objects:
        for path, value in walk(item):
            if value is None:
                yield f"{reference(item)}: {path} is null"
            elif isinstance(value, str | int | float):
                yield from _check_scalar(item["kind"], f"{reference(item)}: {path}", path, value)


def _check_scalar(kind: str, where: str, path: str, value: str | float) -> Iterator[str]:
    for owner, pattern, allowed in _ENUMERATIONS:
        if owner in {"", kind} and re.fullmatch(pattern, path) and value not in allowed:
            yield f"{where} is {value!r}, not one of {', '.join(sorted(allowed))}"
    if _QUANTITIES.fullmatch(path) and parse_quantity(value) is None:
        yield f"{where}: {value!r} is not a quantity"
