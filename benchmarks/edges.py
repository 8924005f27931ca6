"""Measures edges: each connector against its underlying transport and against vLLM-Omni's shared-memory connector.

Two processes exchange tensors. A message's time starts with `send` of a tensor in the producer's ordinary memory and
ends when the consumer has the tensor (see `edge_ways.base`). All ways take turns in each round. A ratio is the median
over the rounds of the ratio of the medians within a round. Consumers read only both ends of a tensor: with a producer
and two consumers on two cores, reading all of it would measure the shortage of cores.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

from benchmarks.edge_ways.base import Receiver, Sender
from benchmarks.edge_ways.findings import Findings, Probe, Times, say, size_text
from benchmarks.edge_ways.namespaces import two_namespaces
from benchmarks.edge_ways.pair import Pair, ReceiverT, SenderT
from benchmarks.edge_ways.plane import STREAMS, GrpcSender, NixlSender, PlaneReceiver, PlaneSender, ShmSender
from benchmarks.edge_ways.raw_grpc import RawGrpcReceiver, RawGrpcSender
from benchmarks.edge_ways.raw_nixl import RawNixlFileReceiver, RawNixlFileSender, RawNixlReceiver, RawNixlSender
from benchmarks.edge_ways.raw_tcp import RawTcpReceiver, RawTcpSender
from benchmarks.edge_ways.segment import SegmentReceiver, SegmentSender
from benchmarks.edge_ways.stages import STREAMS as STAGE_STREAMS
from benchmarks.edge_ways.stages import TENSOR_BYTES, TENSORS_PER_S, FirstStage, SecondStage
from benchmarks.edge_ways.worker import Place, Worker, WorkerError
from benchmarks.report import report

KIB, MIB, GB = 1 << 10, 1 << 20, 1e9
COUNTS = {4 * KIB: 20, 64 * KIB: 20, MIB: 12, 16 * MIB: 5, 64 * MIB: 3}
"""The number of messages in a turn, by size."""
NAMESPACE_COUNTS = {MIB: 12, 16 * MIB: 5, 64 * MIB: 3}
FANOUT_COUNTS = {16 * MIB: 15, 64 * MIB: 5}
TURNS = 3
STREAMS_S = 1.5
"""The approximate time for which all streams send in a turn."""
BESIDE_COUNT, BESIDE_TURNS = 150, 9
BULK_BYTES, BULK_COUNT = MIB, 512
IDLE_S = 3.0
STAGE_TENSORS = 250
"""Tensors of each stream from stage to stage."""

MEMCPY, PEER = "memcpy", "segment + msgpack"
RAW_NIXL, RAW_NIXL_FILE, RAW_READ = "raw NIXL", "raw NIXL on a memory file", "raw NIXL READ alone"
RAW_GRPC, RAW_TCP = "raw gRPC stream", "raw TCP socket"
TWO_CONSUMERS = "shm, two consumers"
FROM_STAGE_TO_STAGE = "from engine to engine"
NIXL_BETWEEN, GRPC_BETWEEN, TCP_BETWEEN = (f"{way}, two namespaces" for way in ("nixl", "grpc", RAW_TCP))

Speeds: TypeAlias = tuple[tuple[str, str, Mapping[int, str]], ...]
"""A way, the baseline, and the goal at each size."""
ON_ONE_HOST: Speeds = (
    ("shm", MEMCPY, {MIB: "", 16 * MIB: ">=0.60", 64 * MIB: ">=0.80"}),
    ("shm", PEER, {MIB: ">=6", 16 * MIB: ">=12", 64 * MIB: ""}),
    ("nixl", RAW_NIXL, {MIB: ">=0.75", 16 * MIB: ">=0.75", 64 * MIB: ">=0.75"}),
    ("nixl", RAW_NIXL_FILE, {MIB: "", 16 * MIB: "", 64 * MIB: ""}),
    ("nixl", RAW_READ, {MIB: "", 16 * MIB: "", 64 * MIB: ""}),
    ("grpc", RAW_GRPC, {MIB: ">=0.80", 16 * MIB: ">=0.80", 64 * MIB: ">=0.80"}),
)
BETWEEN_NAMESPACES: Speeds = (
    (NIXL_BETWEEN, TCP_BETWEEN, {MIB: "", 16 * MIB: ">=0.85", 64 * MIB: ""}),
    (GRPC_BETWEEN, TCP_BETWEEN, {16 * MIB: ""}),
)

Edge: TypeAlias = Pair[PlaneSender, PlaneReceiver]
Edges: TypeAlias = Mapping[str, Edge]
CONNECTORS: Mapping[str, type[PlaneSender]] = {"shm": ShmSender, "nixl": NixlSender, "grpc": GrpcSender}


@contextmanager
def working(
    pairs: Mapping[str, Pair[SenderT, ReceiverT]], findings: Findings
) -> Generator[dict[str, Pair[SenderT, ReceiverT]]]:
    """Connects the pairs and yields those that work here. The failures of the others are recorded."""
    with ExitStack() as stack:
        connected: dict[str, Pair[SenderT, ReceiverT]] = {}
        for way, pair in pairs.items():
            with findings.noting(way):
                connected[way] = stack.enter_context(pair)
        yield connected


def time_on_one_host(edges: Edges, findings: Findings) -> Times:
    """Measures every way at every size."""
    raw_nixl = {RAW_NIXL: Pair(RawNixlSender, RawNixlReceiver)}
    baselines: dict[str, Pair[Sender, Receiver]] = {
        RAW_NIXL_FILE: Pair(RawNixlFileSender, RawNixlFileReceiver),
        PEER: Pair(SegmentSender, SegmentReceiver),
        RAW_GRPC: Pair(RawGrpcSender, RawGrpcReceiver),
        RAW_TCP: Pair(RawTcpSender, RawTcpReceiver),
    }

    def read_alone(*, size_bytes: int, count: int) -> list[float]:
        served = raw_nixl[RAW_NIXL].sender.begin(RawNixlSender.serve)
        times_s = raw_nixl[RAW_NIXL].receivers[0].call(RawNixlReceiver.time_reads, size_bytes=size_bytes, count=count)
        served.result()
        return times_s

    times = Times()
    with working(baselines, findings) as others, working(raw_nixl, findings) as nixl:
        probes: dict[str, Probe] = {MEMCPY: next(iter(edges.values())).time_copies}
        for pairs in (edges, nixl, others):
            probes |= {way: pair.time for way, pair in pairs.items()}
        if nixl:
            probes[RAW_READ] = read_alone
        times.measure(probes, COUNTS, findings)
    return times


def add_speeds(speeds: Speeds, times: Times, findings: Findings) -> None:
    """Adds the speed of ways relative to their baselines."""
    for way, other, goals in speeds:
        for size, goal in goals.items():
            findings.add(
                f"speed / {other.partition(',')[0]}, {size_text(size)}",
                partial(times.ratio, other, way, size),
                "ratio",
                goal=goal,
                subject=way,
                other=other,
            )


def chunks_per_s(edge: Edge) -> float:
    """Returns the chunks per second of all streams. Earlier turns open the flows and find the number to send."""

    def rate(steps: int) -> float:
        arrived_s = edge.receivers[0].begin(PlaneReceiver.receive_steps, steps=steps)
        begun_s = edge.sender.call(PlaneSender.send_steps, steps=steps)
        return STREAMS * steps / (arrived_s.result() - begun_s)

    rate(1)
    steps = round(rate(20) * STREAMS_S / STREAMS)
    return statistics.median(rate(steps) for _ in range(TURNS))


def delay_beside_large_ms(edge: Edge) -> float:
    """Returns the growth of the 99th percentile of a small chunk's time while large tensors are sent."""
    times_ms: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(BESIDE_TURNS):
        for large, found in times_ms.items():
            ends = edge.receivers[0].begin(PlaneReceiver.receive_beside, count=BESIDE_COUNT, large=large)
            starts = edge.sender.call(PlaneSender.send_beside, count=BESIDE_COUNT, large=large)
            found.extend((end - start) / 1e6 for start, end in zip(starts, ends.result(), strict=True))
    alone_ms, beside_ms = (statistics.quantiles(found, n=100)[-1] for found in times_ms.values())
    return beside_ms - alone_ms


def cpu_s_per_gb(edge: Edge) -> float:
    """Returns the processor time of both replicas for a gigabyte."""
    used_s = -edge.cpu_s()
    arrived = edge.receivers[0].begin(PlaneReceiver.receive_many, count=BULK_COUNT)
    edge.sender.call(PlaneSender.send_many, size_bytes=BULK_BYTES, count=BULK_COUNT)
    arrived.result()
    return (used_s + edge.cpu_s()) / (BULK_BYTES * BULK_COUNT / GB)


def copies(edge: Edge) -> float:
    """Returns how often a processor copies each byte, not counting the transport itself."""
    copied_bytes = -edge.sender.call(PlaneSender.copied_bytes) - edge.receivers[0].call(PlaneReceiver.copied_bytes)
    arrived = edge.receivers[0].begin(PlaneReceiver.receive_many, count=BULK_COUNT)
    edge.sender.call(PlaneSender.send_many, size_bytes=BULK_BYTES, count=BULK_COUNT)
    arrived.result()
    copied_bytes += edge.sender.call(PlaneSender.copied_bytes) + edge.receivers[0].call(PlaneReceiver.copied_bytes)
    return copied_bytes / (BULK_BYTES * BULK_COUNT)


def idle_cores(edge: Edge) -> float:
    """Returns the fraction of a core that both replicas use while nothing is sent."""
    used_s = -edge.cpu_s()
    time.sleep(IDLE_S)
    return (used_s + edge.cpu_s()) / IDLE_S


BEHAVIOUR: tuple[tuple[str, Callable[[Edge], float], str, Mapping[str, str]], ...] = (
    (f"chunks of 64 KiB, {STREAMS} streams", chunks_per_s, "1/s", {"shm": ">=20000", "nixl": "", "grpc": ""}),
    ("p99 of 64 KiB, more beside 64 MiB", delay_beside_large_ms, "ms", {"shm": "<=2", "nixl": "<=2", "grpc": "<=2"}),
    ("processor time, both ends", cpu_s_per_gb, "s/GB", {"shm": "", "nixl": "", "grpc": ""}),
    ("copies into an arena, each byte", copies, "", {"shm": "<=1", "nixl": "<=1"}),
    ("processor while idle, both ends", idle_cores, "cores", {"shm": "", "nixl": "<=0.01", "grpc": ""}),
)
"""Further measurements of an edge, each with its goal by connector."""


def add_behaviour(edges: Edges, findings: Findings) -> None:
    """Adds the figures that single messages do not show."""
    for what, measure_edge, unit, goals in BEHAVIOUR:
        say(what)
        for way, goal in goals.items():
            value = partial(_of_edge, measure_edge, edges, way)
            findings.add(what, value, unit, goal=goal, subject=way)


def _of_edge(measure_edge: Callable[[Edge], float], edges: Edges, way: str) -> float:
    return measure_edge(edges[way])


def add_fanout(edges: Edges, findings: Findings) -> None:
    """Adds the time of a tensor for two consumers relative to one."""
    two = {TWO_CONSUMERS: Pair(ShmSender, PlaneReceiver, receivers=2)}
    times = Times()
    with working(two, findings) as connected:
        probes: dict[str, Probe] = {way: pair.time for way, pair in connected.items()}
        if "shm" in edges:
            probes["shm"] = edges["shm"].time
        times.measure(probes, FANOUT_COUNTS, findings)
    for size in FANOUT_COUNTS:
        findings.add(
            f"time, two consumers / one, {size_text(size)}",
            partial(times.ratio, TWO_CONSUMERS, "shm", size),
            "ratio",
            goal="<=1.15",
            subject="shm",
            other=TWO_CONSUMERS,
        )


def add_small_tensors(findings: Findings) -> None:
    """Measures small tensors from one stage's engine to the next stage's engine."""
    say(f"{STAGE_STREAMS} streams from stage to stage")
    times_s: list[float] = []
    with findings.noting(FROM_STAGE_TO_STAGE):
        times_s = _stage_times_s()
    for percent, goal in ((50, "<=1"), (99, "<=5")):
        findings.add(
            f"p{percent} of {size_text(TENSOR_BYTES)}, {STAGE_STREAMS} streams of {TENSORS_PER_S} a second",
            partial(_percentile_ms, times_s, percent),
            "ms",
            goal=goal,
            subject=FROM_STAGE_TO_STAGE,
        )


def _percentile_ms(times_s: list[float], percent: int) -> float:
    return statistics.quantiles(times_s, n=100)[percent - 1] * 1e3


def _stage_times_s() -> list[float]:
    near, far = Pipe()
    with ExitStack() as stack:
        first = Worker(FirstStage, [near], Place())
        stack.callback(first.close)
        second = Worker(SecondStage, [far], Place())
        stack.callback(second.close)
        near.close()
        far.close()
        first.ready()
        second.ready()
        received = second.begin(SecondStage.receive, count=STAGE_TENSORS)
        first.call(FirstStage.emit, count=STAGE_TENSORS)
        return received.result()


def add_namespaces(findings: Findings) -> None:
    """Adds the ways that work between hosts, measured between two network namespaces."""
    times = Times()
    try:
        with two_namespaces() as places:
            ways: dict[str, Pair[Sender, Receiver]] = {
                NIXL_BETWEEN: Pair(NixlSender, PlaneReceiver, places=places),
                GRPC_BETWEEN: Pair(GrpcSender, PlaneReceiver, places=places),
                TCP_BETWEEN: Pair(RawTcpSender, RawTcpReceiver, places=places),
            }
            with working(ways, findings) as connected:
                times.measure({way: pair.time for way, pair in connected.items()}, NAMESPACE_COUNTS, findings)
    except WorkerError as exc:
        findings.broken |= dict.fromkeys((NIXL_BETWEEN, GRPC_BETWEEN, TCP_BETWEEN), str(exc))
    add_speeds(BETWEEN_NAMESPACES, times, findings)


def measure(findings: Findings) -> Times:
    """Measures everything and returns the times of single messages on one host."""
    pairs = {way: Pair(sender, PlaneReceiver) for way, sender in CONNECTORS.items()}
    with working(pairs, findings) as edges:
        times = time_on_one_host(edges, findings)
        add_speeds(ON_ONE_HOST, times, findings)
        one_us = partial(times.median_us, "shm", 64 * KIB)
        findings.add("one message, 64 KiB", one_us, "µs", goal="<=250", subject="shm")
        add_behaviour(edges, findings)
        add_fanout(edges, findings)
    add_small_tensors(findings)
    add_namespaces(findings)
    return times


def print_times(times: Times) -> None:
    """Prints the times of single messages."""
    table = Table("µs, one message, one way", *map(size_text, COUNTS), title="edges: times", title_justify="left")
    for way in times.ways:
        table.add_row(way, *(f"{times.median_us(way, size):,.0f}" if times.has(way, size) else "-" for size in COUNTS))
    Console().print(table)


def main() -> None:
    """Reads the command line, measures and reports."""
    # Set before gRPC and NIXL are imported, here and in the processes that this one starts.
    os.environ |= {"GRPC_VERBOSITY": "ERROR", "NIXL_LOG_LEVEL": "ERROR"}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    findings = Findings()
    times = measure(findings)
    print_times(times)
    report(
        "edges", findings.by_subject(), json_file=arguments.json, details=times.figures(), left_out=findings.left_out
    )


if __name__ == "__main__":
    main()
