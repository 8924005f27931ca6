"""The rules of `stagemesh doctor`: finds what is wrong with a deployment, from what its processes report."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

from stagemesh.v1 import admin_pb2, chunk_pb2

_SOON_S, _DAY_S = 7 * 86400.0, 86400.0
_MAX_SKEW_S = 1.0
_LEAST_FILES = 4096
_LEAST_SHARED_BYTES = 64 << 20
_LEAST_MEMORY_BYTES = 512 << 20
_MIB = 1 << 20
_UNIMPLEMENTED = 12
"""The number of the status in google.rpc.Code."""


class Severity(Enum):
    """How bad a finding is."""

    ERROR = "error"
    """Requests fail, or soon will."""
    WARNING = "warning"
    """Requests succeed, but something is slow, fragile or surprising."""


class Finding(NamedTuple):
    """A problem: where it is, what it is, and how to repair it."""

    severity: Severity
    where: str
    problem: str
    remedy: str


_error, _warning = partial(Finding, Severity.ERROR), partial(Finding, Severity.WARNING)


class Deployment(NamedTuple):
    """The answers of the orchestrator."""

    stages: Sequence[admin_pb2.StageStatus]
    edges: Sequence[admin_pb2.EdgeStatus]
    processes: Sequence[admin_pb2.ProcessReport]
    now_s: float
    """The time of this machine when the orchestrator made its report, in seconds since 1970."""
    now_error_s: float
    """The largest error of `now_s` in seconds."""


def diagnose(found: Deployment) -> list[Finding]:
    """Returns the findings, errors first."""
    answered = [each for each in found.processes if each.HasField("report")]
    findings = [
        *_stages_without_replicas(found.stages),
        *_edges(found.edges),
        *_unanswered(found.processes),
        *_clocks(found),
        *_versions(answered),
        *(finding for each in answered for finding in _host(each, found)),
    ]
    return sorted(findings, key=lambda finding: finding.severity is not Severity.ERROR)


def _stages_without_replicas(stages: Iterable[admin_pb2.StageStatus]) -> Iterator[Finding]:
    for stage in stages:
        if not stage.ready:
            yield _error(
                stage.name,
                f"none of its {stage.replicas} replicas accepts requests" if stage.replicas else "it has no replica",
                "start one, or see its log; `stagemesh admin replicas` shows its state",
            )
        if len(stage.generations) > 1:
            yield _warning(
                stage.name,
                f"its replicas are of {len(stage.generations)} generations",
                "finish the upgrade, or stop the replicas of the older generation",
            )


def _edges(edges: Iterable[admin_pb2.EdgeStatus]) -> Iterator[Finding]:
    for edge in edges:
        for link in edge.edge.links:
            if link.HasField("error"):
                yield _error(
                    f"{edge.edge.name}: {link.producer} to {link.consumer}",
                    f"no connector works: {link.error.message}",
                    "repair the cause, then run `stagemesh admin probe`",
                )


def _unanswered(processes: Iterable[admin_pb2.ProcessReport]) -> Iterator[Finding]:
    for each in processes:
        if each.HasField("error"):
            # UNIMPLEMENTED: an external stage, or one of an older version.
            severity = Severity.WARNING if each.error.code == _UNIMPLEMENTED else Severity.ERROR
            remedy = "check it by hand" if severity is Severity.WARNING else "see its log, and the network between"
            yield Finding(severity, each.process, f"it does not report: {each.error.message}", remedy)


def _clocks(found: Deployment) -> Iterator[Finding]:
    own = next((each for each in found.processes if not each.stage and each.HasField("report")), None)
    skews = [(each.process, each.clock_ahead_s, each.clock_error_s) for each in found.processes if each.stage]
    if own is not None:
        skews.append((f"{own.process}, against this machine", own.report.time_s - found.now_s, found.now_error_s))
    for where, ahead_s, error_s in skews:
        if abs(ahead_s) > _MAX_SKEW_S + error_s:
            yield _warning(
                where,
                f"its clock is {abs(ahead_s):.1f} s {'ahead' if ahead_s > 0 else 'behind'}",
                "synchronise the clocks (NTP); tokens, certificates and times in logs depend on them",
            )


def _versions(processes: Sequence[admin_pb2.ProcessReport]) -> Iterator[Finding]:
    software = _groups(processes, lambda each: each.report.software)
    if len(software) > 1:
        yield _warning("all processes", f"they run different versions: {_listed(software)}", "finish the upgrade")
    stages = _groups([each for each in processes if each.stage], lambda each: each.stage)
    for stage, replicas in stages.items():
        for package in sorted({name for each in replicas for name in each.report.packages}):
            versions = _groups(replicas, partial(_version_of, package))
            if len(versions) > 1:
                yield _warning(
                    stage,
                    f"its replicas have different versions of {package}: {_listed(versions)}",
                    "install the same version; recovered requests may otherwise differ",
                )


def _host(process: admin_pb2.ProcessReport, found: Deployment) -> Iterator[Finding]:
    report, where = process.report, f"{process.process} on {process.report.host}"
    if report.HasField("certificate_expires_at_s"):
        left_s = report.certificate_expires_at_s - report.time_s
        if left_s < _SOON_S:
            yield Finding(
                Severity.ERROR if left_s <= 0 else Severity.WARNING,
                where,
                "its certificate has expired" if left_s <= 0 else f"its certificate expires in {left_s / _DAY_S:.1f} d",
                "renew tls.crt and tls.key; the process reads them again by itself",
            )
    if report.HasField("open_files") and report.open_files < _LEAST_FILES:
        yield _warning(
            where,
            f"it may open only {report.open_files:,} files",
            f"raise the limit (ulimit -n) to {_LEAST_FILES:,} or more; each connection needs one",
        )
    if 0 < report.available_bytes < _LEAST_MEMORY_BYTES:
        yield _warning(
            where,
            f"only {report.available_bytes // _MIB:,} MiB of memory are left",
            "raise the memory limit, or lower the load or `data_plane.arena_bytes`",
        )
    if process.stage:
        yield from _data_plane(process, where, found.edges)


def _data_plane(
    process: admin_pb2.ProcessReport, where: str, edges: Sequence[admin_pb2.EdgeStatus]
) -> Iterator[Finding]:
    report = process.report
    if report.shm_free_bytes < _LEAST_SHARED_BYTES:
        yield _warning(
            where,
            f"only {report.shm_free_bytes // _MIB:,} of {report.shm_bytes // _MIB:,} MiB of /dev/shm are free",
            "enlarge it (docker --shm-size, or shmBytes of the Helm chart), or lower `data_plane.arena_bytes`",
        )
    links = [link for edge in edges for link in edge.edge.links if process.process in (link.producer, link.consumer)]
    has_tls = report.HasField("certificate_expires_at_s")
    if all(link.connector != chunk_pb2.CONNECTOR_NIXL for link in links):
        is_refused = any(link.refusals and link.connector == chunk_pb2.CONNECTOR_GRPC for link in links)
        if is_refused and has_tls and not report.rdma_devices and "nixl-cu12" in report.packages:
            yield _warning(
                where,
                "it uses gRPC to other hosts, because with certificates nixl needs an RDMA device",
                "give the process a device (`rdma` of the Helm chart), or ignore this if there is none",
            )
        return
    if not report.rdma_devices:
        yield _warning(
            where,
            f"it uses nixl without an RDMA device, so that chunks travel by TCP{' without TLS' if has_tls else ''}",
            "give the process a device (`rdma` of the Helm chart), or ignore this if there is none",
        )
    elif report.HasField("locked_bytes"):
        yield _warning(
            where,
            f"it may lock only {report.locked_bytes // _MIB:,} MiB of memory, which RDMA needs for its arena",
            "remove the limit (ulimit -l unlimited, LimitMEMLOCK=infinity of the container runtime)",
        )
    if report.ucx_tls == "tcp" and report.rdma_devices:
        yield _warning(where, "UCX_TLS is tcp, although there is an RDMA device", "remove UCX_TLS, or add rc")


def _version_of(package: str, process: admin_pb2.ProcessReport) -> str:
    return process.report.packages.get(package, "none")


def _groups(
    processes: Iterable[admin_pb2.ProcessReport], key: Callable[[admin_pb2.ProcessReport], str]
) -> dict[str, list[admin_pb2.ProcessReport]]:
    groups = defaultdict[str, list[admin_pb2.ProcessReport]](list)
    for each in processes:
        groups[key(each)].append(each)
    return groups


def _listed(groups: dict[str, list[admin_pb2.ProcessReport]]) -> str:
    return "; ".join(f"{value} ({', '.join(each.process for each in members)})" for value, members in groups.items())
