"""Measures what TLS, metrics and traces cost: a pipeline of fake stages with them, and without.

    python -m benchmarks.overhead --json out/overhead.json

All run in alternation, in processes of their own on this host. One kind of request has small outputs, so that its time
is that of the calls. The other moves large chunks over an edge with shared memory, which TLS does not concern.

TLS is measured by the time of a request, with certificates for all processes. Metrics and traces are measured by the
processor time of the orchestrator and the stages for each output: all of them serve metrics, which are scraped every
five seconds, and a tenth of the requests is traced and exported to a collector.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from benchmarks.report import Figure, report
from stagemesh.cli.launcher import Launcher
from stagemesh.cli.launcher.certificates import Authority
from stagemesh.client import AsyncClient
from stagemesh.pipeline import load_pipeline

_PIPELINE = """\
pipeline: overhead
stages:
  source: {{engine: fake, function: source, options: {{steps: {steps}, step_s: 0.0, size_bytes: {size_bytes}}}}}
  relay: {{engine: fake, function: relay, options: {{size_bytes: 64}}}}
edges: [{{from: source, to: relay, connector: shm}}]
outputs: {{text: relay}}
"""
_SMALL, _LARGE = {"steps": 8, "size_bytes": 256}, {"steps": 64, "size_bytes": 1 << 20}
_OUTPUTS = {"steps": 32, "size_bytes": 256}
_WARM_UP = 20
_AT_ONCE = 4
_SCRAPE_S = 5.0


class Times(NamedTuple):
    """The median time of a request with small outputs, and of one with large chunks, in seconds."""

    small_s: float
    large_s: float


async def measure(folder: Path, *, tls: bool, small: int, large: int) -> Times:
    """Starts the pipelines and runs this number of requests of each kind, one after the other."""
    authority = Authority(folder / "authority") if tls else None
    medians: list[float] = []
    for name, options, count in (("small", _SMALL, small), ("large", _LARGE, large)):
        path = folder / f"{name}.yaml"
        path.write_text(_PIPELINE.format(**options))
        launcher = Launcher(load_pipeline(str(path)), listen="127.0.0.1:0", authority=authority)
        async with launcher.running():
            await launcher.wait_ready()
            async with AsyncClient(launcher.endpoint) as client:
                times_s = [await _time_request(client) for _ in range(_WARM_UP + count)]
        medians.append(statistics.median(times_s[_WARM_UP:]))
    return Times(*medians)


async def _time_request(client: AsyncClient) -> float:
    began_s = time.perf_counter()
    await client.generate("hello").result()
    return time.perf_counter() - began_s


def figures(plain: Sequence[Times], secure: Sequence[Times]) -> list[Figure]:
    """Returns the figures of paired measurements without and with TLS."""
    median, pairs = statistics.median, list(zip(plain, secure, strict=True))
    return [
        Figure(
            "request with small outputs, TLS / plaintext",
            median(b.small_s / a.small_s for a, b in pairs),
            "ratio",
            "<=1.15",
            "TLS",
        ),
        Figure(
            "request with large chunks over shm, TLS / plaintext",
            median(b.large_s / a.large_s for a, b in pairs),
            "ratio",
            "<=1.02",
            "TLS",
        ),
        Figure("request with small outputs, plaintext", 1000 * median(each.small_s for each in plain), "ms", "", "TLS"),
        Figure("request with large chunks, plaintext", 1000 * median(each.large_s for each in plain), "ms", "", "TLS"),
    ]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector of traces that counts the spans that it receives."""

    def __init__(self) -> None:
        self.spans = 0

    def Export(self, request: Any, context: object) -> Any:  # noqa: N802
        """Receives spans."""
        del context
        self.spans += sum(len(scope.spans) for each in request.resource_spans for scope in each.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Generator[Collector]:
    """Serves a collector. Orchestrators that start within the block trace a tenth of the requests."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.1",
    }
    os.environ.update(variables)
    try:
        yield collector
    finally:
        for name in variables:
            del os.environ[name]
        server.stop(None).wait()


async def measure_cpu(folder: Path, *, blocks: int, requests: int) -> Mapping[bool, Sequence[float]]:
    """Runs blocks of this number of requests, four at a time, in turn with and without metrics and traces.

    Returns the processor time of all processes for each output of each block in seconds, by whether there were metrics
    and traces. Both deployments run at the same time, and only one of them works.
    """
    path = folder / "watched.yaml"
    path.write_text(_PIPELINE.format(**_OUTPUTS))
    pipeline = load_pipeline(str(path))
    plain = Launcher(pipeline, listen="127.0.0.1:0")
    used_s: dict[bool, list[float]] = {False: [], True: []}
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(plain.running())
        await plain.wait_ready()
        collector = stack.enter_context(collecting())
        watched = Launcher(pipeline, listen="127.0.0.1:0", metrics=True)
        await stack.enter_async_context(watched.running())
        await watched.wait_ready()
        scraping = asyncio.create_task(_scrape(list(watched.metrics_endpoints.values())))
        stack.callback(scraping.cancel)
        clients = [await stack.enter_async_context(AsyncClient(each.endpoint)) for each in (plain, watched)]
        for client in clients:
            await _generate(client, requests)
        for number in range(2 * blocks):
            # In the order plain, watched, watched, plain.
            is_watched = number % 4 in (1, 2)
            launcher = (plain, watched)[is_watched]
            before_s = _cpu_s(launcher)
            await _generate(clients[is_watched], requests)
            # The processor time of the last exports belongs to the block.
            await asyncio.sleep(0.5)
            used_s[is_watched].append((_cpu_s(launcher) - before_s) / (requests * _OUTPUTS["steps"]))
        if not collector.spans:
            raise RuntimeError("no trace was exported")
    return used_s


async def _generate(client: AsyncClient, requests: int) -> None:
    left = iter(range(requests))

    async def work() -> None:
        for _ in left:
            await client.generate("hello").result()

    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))


async def _scrape(endpoints: Sequence[str]) -> None:
    while True:
        for endpoint in endpoints:
            await asyncio.to_thread(_read, f"http://{endpoint}/metrics")
        await asyncio.sleep(_SCRAPE_S)


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310  # the scheme is http
        return bytes(answer.read())


def _cpu_s(launcher: Launcher) -> float:
    """Returns the processor time that the orchestrator and the stages have used, in seconds."""
    pids = [status.process_id for status in launcher.processes.values() if status.process_id is not None]
    times = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(fields[11]) + int(fields[12]) for fields in times) / os.sysconf("SC_CLK_TCK")


def cpu_figures(used_s: Mapping[bool, Sequence[float]]) -> list[Figure]:
    """Returns the figures of paired measurements without and with metrics and traces."""
    ratio = statistics.median(b / a for a, b in zip(used_s[False], used_s[True], strict=True))
    subject = "metrics and traces"
    return [
        Figure(
            "processor time of an output, with metrics and 10 % traced / without", ratio, "ratio", "<=1.03", subject
        ),
        Figure("processor time of an output, without", 1e6 * statistics.median(used_s[False]), "us", "", subject),
    ]


async def _run(repeats: int, small: int, large: int, blocks: int, requests: int) -> list[Figure]:
    times: dict[bool, list[Times]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as name:
        used_s = await measure_cpu(Path(name), blocks=blocks, requests=requests)
        for number in range(repeats):
            # The order alternates, so that a machine that becomes slower does not favor one of them.
            for tls in (False, True) if number % 2 == 0 else (True, False):
                times[tls].append(await measure(Path(name), tls=tls, small=small, large=large))
    return [*figures(times[False], times[True]), *cpu_figures(used_s)]


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="Write the figures to this file.")
    parser.add_argument("--repeats", type=int, default=6, help="Number of alternations. Default 6.")
    parser.add_argument("--requests", type=int, default=200, help="Requests with small outputs. Default 200.")
    parser.add_argument("--blocks", type=int, default=16, help="Blocks with metrics and traces. Default 16.")
    parser.add_argument("--block-requests", type=int, default=100, help="Requests of a block. Default 100.")
    parser.add_argument("--large-requests", type=int, default=40, help="Requests with large chunks. Default 40.")
    arguments = parser.parse_args()
    found = asyncio.run(
        _run(
            arguments.repeats, arguments.requests, arguments.large_requests, arguments.blocks, arguments.block_requests
        )
    )
    report("overhead", found, json_file=arguments.json)


if __name__ == "__main__":
    main()
