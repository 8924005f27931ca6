import asyncio
import json
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import psutil
import pytest

from stagemesh.bench.transport import SIZES, ProbePeer, measure_peer, measurement, second_process
from stagemesh.bench.transport.peer import make_plane
from stagemesh.common.errors import ExitCode, NotReadyError
from stagemesh.connectors.arena import memory
from stagemesh.rpc.server import Server
from tests.cli.commands import COMMAND, Ran, invoke, run_process, stagemesh
from tests.connectors.namespaces import ENVIRONMENT, namespaces
from tests.stage.replicas import served_stage


@asynccontextmanager
async def _serving(
    address: str = "127.0.0.1:0", *, within: tuple[str, ...] = (), environment: tuple[str, ...] = ()
) -> AsyncGenerator[str]:
    """Runs `stagemesh probe-transport --serve`, yields its endpoint, and ends it by SIGINT."""
    command = [*within, *environment, *COMMAND, "probe-transport", "--serve", address, "--json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield json.loads(await process.stdout.readline())["endpoint"]
    finally:
        # A command within a namespace runs as a child of the process that entered the namespace.
        served = [psutil.Process(process.pid), *psutil.Process(process.pid).children()][-1]
        served.send_signal(signal.SIGINT)
        await process.communicate()
    assert process.returncode == 0


def _check(ran: Ran, *, choice: str, usable: list[str]) -> None:
    report = json.loads(ran.stdout)
    assert report["choice"] == choice
    assert [each["connector"] for each in report["connectors"]] == ["shm", "nixl", "grpc"]
    assert [each["connector"] for each in report["connectors"] if not each["refusal"]] == usable
    for figures in report["connectors"]:
        assert list(figures["one_way_s"]) == [str(size) for size in SIZES if figures["connector"] in usable]
        assert (figures["bytes_per_s"] > 1e6, figures["cpu_s_per_gb"] > 0) == (figures["connector"] in usable,) * 2


async def test_this_host_is_measured_and_the_selected_connector_printed() -> None:
    ran = await stagemesh("probe-transport")
    first_words = [words[0] for words in map(str.split, ran.output.splitlines()) if words]
    assert first_words[2:5] == ["shm", "nixl", "grpc"]
    assert "auto selects shm, the best of all connectors" in ran.stdout
    assert ran.stderr.splitlines()[-3:] == ["measuring shm", "measuring nixl", "measuring grpc"]


async def test_a_peer_that_serves_probes_is_measured() -> None:
    async with _serving() as endpoint:
        ran = await stagemesh("probe-transport", endpoint, "--json")
    _check(ran, choice="shm", usable=["shm", "nixl", "grpc"])


async def test_shm_is_not_used_between_hosts() -> None:
    with namespaces() as net:
        environment = ("env", *(f"{name}={value}" for name, value in ENVIRONMENT.items()))
        there, here = (tuple(net.within(number)) for number in (1, 0))
        async with _serving(f"{net.address(1)}:0", within=there, environment=environment) as endpoint:
            ran = await run_process("probe-transport", endpoint, "--json", program=(*here, *environment, *COMMAND))
    _check(ran, choice="nixl", usable=["nixl", "grpc"])
    report = json.loads(ran.stdout)
    assert not report["same_host"]
    assert 0 < report["clock_error_s"] < 1
    assert report["passed_over"]["shm"] == report["connectors"][0]["refusal"]
    assert "not on one host" in report["passed_over"]["shm"]


async def test_a_second_process_ends_with_its_body() -> None:
    async with second_process() as endpoint:
        host, port = endpoint.split(":")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))


async def test_an_unreachable_peer_is_named_with_a_remedy() -> None:
    ran = await stagemesh("probe-transport", "127.0.0.1:1")
    remedy = "run `stagemesh probe-transport --serve 127.0.0.1:1` there"
    ran.check(ExitCode.UNAVAILABLE, "nothing answers at 127.0.0.1:1", remedy)


async def test_a_malformed_address_is_rejected() -> None:
    ran = await stagemesh("probe-transport", "nowhere", "--json")
    assert (ran.exit_code, json.loads(ran.stderr)["error"]["reason"]) == (ExitCode.USAGE, "INVALID_ADDRESS")


async def test_a_replica_is_not_measured() -> None:
    async with served_stage() as thinker:
        with pytest.raises(NotReadyError, match="is replica thinker-0 of pipeline test, which is not measured"):
            await measure_peer(thinker.endpoint, progress=print)


async def test_a_peer_of_another_version_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("127.0.0.1:0")
    async with ProbePeer.added_to(server.grpc):
        endpoint = f"127.0.0.1:{await server.start()}"
        monkeypatch.setattr(measurement, "version", lambda _: "9.9")
        with pytest.raises(NotReadyError, match=r"this host 9\.9; install the same on both"):
            await measure_peer(endpoint, progress=print)
        await server.stop(grace_s=0)


async def test_too_little_shared_memory_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 20)
    with pytest.raises(NotReadyError, match=r"64 MiB of shared memory .*; give the host or container more memory"):
        make_plane("prober")


def test_measuring_and_serving_exclude_each_other() -> None:
    assert invoke("probe-transport", "127.0.0.1:1", "--serve", "127.0.0.1:0").exit_code == 2
