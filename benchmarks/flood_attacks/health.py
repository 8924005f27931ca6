"""Asks a process for its health every few milliseconds, and reports the longest time that it did not answer.

    python -m benchmarks.flood_attacks.health 127.0.0.1:50051 PID
    python -m benchmarks.flood_attacks.health http://127.0.0.1:8000 PID

Prints "asking", asks until its input ends, and prints the longest time in seconds. The event loop of the process makes
each answer, in the main thread of the process PID: the time is at least the time for which the loop was blocked. The
times for which this thread and that one waited for a processor are subtracted.
"""

import http.client
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_PAUSE_S = 0.005
_TIMEOUT_S = 60


def _queued_s(process_id: str) -> float:
    """Returns how long this thread, and the main thread of a process, have waited for a processor."""
    files = Path("/proc/thread-self/schedstat"), Path(f"/proc/{process_id}/task/{process_id}/schedstat")
    return sum(int(file.read_bytes().split()[1]) for file in files) / 1e9


def _make_check(endpoint: str) -> Callable[[], object]:
    if endpoint.startswith("http://"):
        connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=_TIMEOUT_S)

        def ask() -> None:
            connection.request("GET", "/health")
            connection.getresponse().read()

        return ask
    stub: Any = health_pb2_grpc.HealthStub(grpc.insecure_channel(endpoint))
    return lambda: stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)


def main() -> None:
    """Asks until the input of this process ends."""
    endpoint, process_id = sys.argv[1:]
    check, ended, longest_s = _make_check(endpoint), threading.Event(), 0.0
    check()
    print("asking", flush=True)

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    while not ended.wait(_PAUSE_S):
        began_s, queued_s = time.monotonic(), _queued_s(process_id)
        try:
            check()
        except (grpc.RpcError, OSError, http.client.HTTPException) as exc:
            # The time until the failure counts, too.
            print(f"a health check failed: {exc!r:.200}", file=sys.stderr)
            check = _make_check(endpoint)
        longest_s = max(longest_s, time.monotonic() - began_s - (_queued_s(process_id) - queued_s))
    print(longest_s)


if __name__ == "__main__":
    main()
