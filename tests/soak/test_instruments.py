"""The instruments of a soak: what they find in deliveries, measurements and reports, and the effect of each fault."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.client.responses import Admitted, AudioChunk, Finished, TensorOutput, Text, Timings
from tests.children import killed_at_end
from tests.soak.connections import sever
from tests.soak.delivery import Arrivals, Delivery, Flaws, flaws
from tests.soak.footprint import Sample, growth, sample
from tests.soak.report import Report
from tests.soak.workload import Request, requests, units

UNITS = [f"Step {number} is {number:08x}. ".encode() for number in range(12)]
WHOLE = b"".join(UNITS)
REQUEST = Request("hello", seed=1, steps=4)
FINISHED = Finished(({},), Timings(0.0, None, 0.0))


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([0, 1, 2, 3], Flaws()),
        ([0, 1, 1, 2, 3], Flaws(duplicated=1)),
        ([0, 1, 2, 0, 1, 2, 3], Flaws(duplicated=3)),
        ([0, 1, 3], Flaws(lost=1)),
        ([0, 1], Flaws(lost=2)),
        ([], Flaws(lost=4)),
        ([0, 2, 1, 3], Flaws(reordered=1)),
        ([1, 2, 3, 0], Flaws(reordered=1)),
        ([0, 1, 2, 3, 11], Flaws(altered=1)),
        ([0, 11, 2, 3], Flaws(lost=1, altered=1)),
    ],
)
def test_each_flaw_is_named(numbers: list[int], expected: Flaws) -> None:
    assert flaws(b"".join(UNITS[number] for number in numbers), UNITS[:4]) == expected


@pytest.mark.parametrize("received", [WHOLE[:-3], WHOLE[:30] + b"?" + WHOLE[31:]], ids=["cut", "one byte"])
def test_a_damaged_unit_is_lost_and_altered(received: bytes) -> None:
    assert flaws(received, UNITS) == Flaws(lost=1, altered=1)


@given(st.lists(st.integers(0, 11), max_size=24))
def test_units_are_counted_once_each_and_only_all_in_order_are_without_flaws(numbers: list[int]) -> None:
    found = flaws(b"".join(UNITS[number] for number in numbers), UNITS)
    assert bool(found) == (numbers != list(range(12)))
    assert found.altered == 0
    assert len(numbers) - found.duplicated + found.lost == len(UNITS)


def test_the_units_of_a_request_differ_in_every_output() -> None:
    for request in requests(1, count=20, steps=(20, 60)):
        for made in units(request).values():
            assert len(set(made)) == len(made) == request.steps


def _delivered(*, without: int = 0, cut: int = 1) -> Delivery:
    """A delivery of four units whose pieces are cut in other places than the units."""
    delivery = Delivery(REQUEST, {"text": UNITS[:4], "frames": UNITS[:4], "audio": UNITS[:4]})
    delivery.add(Admitted("r", 1, ({},)))
    whole = b"".join(UNITS[:4])
    for at in range(0, len(whole), cut * 4):
        piece = whole[at : at + cut * 4]
        delivery.add(Text("text", piece.decode()))
        delivery.add(TensorOutput("frames", "frames", np.frombuffer(piece, np.uint8)))
        delivery.add(AudioChunk("audio", np.frombuffer(piece, np.float32), 24_000))
    if not without:
        delivery.add(FINISHED)
    return delivery


def test_outputs_may_be_cut_anywhere() -> None:
    delivery = _delivered(cut=3)
    assert delivery.whole()
    assert not delivery.flaws()


def test_a_request_without_its_end_is_incomplete() -> None:
    assert not _delivered(without=1).whole()


def test_output_after_the_end_is_a_flaw() -> None:
    delivery = _delivered()
    delivery.add(FINISHED)
    assert delivery.flaws() == Flaws(altered=1)
    assert not delivery.whole()


def test_a_failed_request_is_compared_as_far_as_it_got() -> None:
    delivery = Delivery(REQUEST, {"text": UNITS})
    delivery.error = "it failed"
    delivery.add(Text("text", b"".join(UNITS[:2]).decode() + UNITS[2].decode()[:5]))
    assert not delivery.flaws()
    delivery.add(Text("text", UNITS[2].decode()))
    assert delivery.flaws()


def test_a_pause_ends_with_the_longest_gap() -> None:
    arrivals = Arrivals([b"x"] * 7, [1.0, 1.1, 1.2, 1.25, 2.0, 2.3, 9.0])
    assert arrivals.pause_s(1.15) == pytest.approx(0.85)
    assert arrivals.pause_s(8.0) == pytest.approx(1.0)
    assert arrivals.pause_s(9.5) is None


def test_a_usual_pause_is_not_one_of_the_fault() -> None:
    usual = Arrivals([b"ab", b"cd", b"ef", b"gh"], [0.0, 0.1, 2.1, 2.2])
    late = Arrivals([b"ab", b"cd", b"ef", b"gh"], [10.0, 10.1, 12.6, 12.7])
    assert late.pause_s(10.2, usual=usual) == pytest.approx(0.5)
    assert late.pause_s(12.3, usual=usual) == pytest.approx(0.3)
    assert usual.pause_s(0.5, usual=usual) == pytest.approx(0.0)
    assert Arrivals([b"abcde", b"f", b"gh"], [10.0, 12.6, 12.7]).pause_s(10.2, usual=usual) == pytest.approx(0.5)
    assert late.pause_s(10.2) == pytest.approx(2.4)


CLEAN = Report(
    requests=10,
    failed={},
    flawed={},
    timelines={},
    faults={"kill": 3},
    missed_faults=[],
    blows={},
    pause_s={"kill": [0.3, 0.9, 4.0], "nothing": [0.1, 0.2, 0.3]},
    growth=[],
    orchestrator_mb=[40, 41],
    left=[],
    slowest_s=2.0,
)


def _problems(**changes: Any) -> list[str]:
    return replace(CLEAN, **changes).problems()


def test_each_kind_of_problem_fails_a_soak() -> None:
    assert _problems() == []
    assert _problems(failed={"r1": "it broke"}) == ["request r1 failed: it broke"]
    assert len(_problems(flawed={"r1": Flaws(lost=1)})) == 1
    assert len(_problems(missed_faults=["kill of a-0"])) == 1
    assert _problems(growth=["a-0 grew"]) == ["a-0 grew"]
    assert _problems(left=["a-0: 1 running"]) == ["left behind: a-0: 1 running"]
    slow = _problems(pause_s={"kill": [1.5, 1.3, 1.4], "nothing": [0.2]})
    assert slow == ["the median pause after a kill is 1.40 s, and 0.20 s without a fault"]
    # A busy machine pauses without a fault, too.
    assert _problems(pause_s={"kill": [1.4], "nothing": [0.8]}) == []


def test_the_summary_has_the_figures_and_the_problems() -> None:
    summary = replace(CLEAN, flawed={"r1": Flaws(lost=2), "r2": Flaws(lost=1, duplicated=4)}).summary()
    assert "3 faults (3 kill), 0 missed" in summary
    assert "4 duplicated, 3 lost, 0 reordered, 0 altered" in summary
    assert "to resume after kill: median 0.90 s" in summary
    assert "! request r1" in summary


MB = 1 << 20


def _life(heaps_mb: list[float], *, files: list[int] | None = None, process_id: int = 1) -> list[Sample]:
    measured = enumerate(zip(heaps_mb, files or [10] * len(heaps_mb), strict=True))
    return [Sample("one", process_id, float(at), int(heap * MB), each) for at, (heap, each) in measured]


def test_only_processes_that_are_ready_are_measured() -> None:
    statuses = {state: {"state": state, "process_id": os.getpid()} for state in ("loading", "ready")}
    (measured,) = sample(statuses)
    assert measured.process == "ready"
    assert measured.heap_bytes > 1 << 20
    assert measured.files > 2


LIVES: dict[str, tuple[list[Sample], int, list[str]]] = {
    "constant": (_life([50.0, 52.0, 49.0] * 10), 3, []),
    "growing": (_life([50.0 + at for at in range(30)]), 3, ["one grew from at most 61.0 to 75.0 MB"]),
    "returning callers": (_life([41.0, 41.0, 50.0] + [41.0] * 7 + [51.0] * 20), 1, []),
    "warming": (_life([10.0 * at for at in range(10)] + [100.0] * 20), 10, []),
    "open files": (
        _life([50.0] * 30, files=[10 + 2 * at for at in range(30)]),
        3,
        ["one had at most 32 files open, then 60"],
    ),
    "returning peers": (_life([50.0] * 30, files=[33] * 4 + [51] + [33] * 4 + [51] * 21), 1, []),
    "restarted": ([*_life([50.0] * 10), *_life([90.0] * 10, process_id=2)], 1, []),
}


@pytest.mark.parametrize(("life", "warm_s", "found"), LIVES.values(), ids=LIVES)
def test_only_growth_is_found(life: list[Sample], warm_s: int, found: list[str]) -> None:
    assert growth(life, warm_s=warm_s) == found


_PEER = """
import socket, sys
name, port = sys.argv[1], int(sys.argv[2])
own, mate = socket.socketpair()
local = socket.socket(socket.AF_UNIX)
local.connect(chr(0) + name)
tcp = socket.create_connection(("127.0.0.1", port))
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
input()
mate.send(b"x")
print(own.recv(1), flush=True)
listening.accept()
print("accepted", flush=True)
"""


class _Peer:
    """Starts a process with a local stream and a TCP connection to this one, a socket pair and a listening socket."""

    def __init__(self, process: "subprocess.Popen[str]", local: socket.socket, tcp: socket.socket) -> None:
        self.process, self.local, self.tcp = process, local, tcp
        self.port = int(self.line())

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def peer() -> Iterator[_Peer]:
    name = f"stagemesh-soak-{id(object())}"
    with socket.socket(socket.AF_UNIX) as local, socket.create_server(("127.0.0.1", 0)) as tcp:
        local.bind("\0" + name)
        local.listen()
        command = [sys.executable, "-c", _PEER, name, str(tcp.getsockname()[1])]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with killed_at_end(process), local.accept()[0] as ours, tcp.accept()[0] as also_ours:
            ours.settimeout(5)
            also_ours.settimeout(5)
            yield _Peer(process, ours, also_ours)


def test_severing_ends_local_streams_resets_tcp_and_leaves_other_sockets_open(peer: _Peer) -> None:
    assert sever(peer.process.pid) == 2
    assert peer.local.recv(1) == b""
    with pytest.raises(ConnectionResetError):
        peer.tcp.recv(1)
    assert peer.process.stdin is not None
    peer.process.stdin.write("\n")
    peer.process.stdin.flush()
    assert peer.line() == "b'x'"
    with socket.create_connection(("127.0.0.1", peer.port), timeout=5):
        assert peer.line() == "accepted"


def test_severing_a_process_without_connections_is_an_error() -> None:
    with killed_at_end(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)) as process:
        assert sever(process.pid) == 0
