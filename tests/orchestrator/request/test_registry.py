import asyncio
from typing import cast

import pytest

from stagemesh.common.errors import ExistsError
from stagemesh.orchestrator.admission import Admission, AdmissionRequest
from stagemesh.orchestrator.planning.planner import Planner
from stagemesh.orchestrator.planning.replacement_replicas import Failover
from stagemesh.orchestrator.request.lifecycle import RequestLifecycle, RequestRegistry
from stagemesh.orchestrator.request.output_record import RequestRecord
from stagemesh.pipeline import Limits


def _known(*, size_bytes: int = 0) -> RequestLifecycle:
    limits = Limits(max_in_flight=1, max_in_flight_bytes=1 << 30, max_queued=1, max_queued_bytes=1 << 30)
    record = RequestRecord()
    record.size_bytes = size_bytes
    return RequestLifecycle(
        record,
        fingerprint=b"content",
        seed=7,
        admission=Admission(limits),
        admission_request=AdmissionRequest("r"),
        failover=Failover(cast("Planner", None)),
    )


async def test_an_ended_request_can_be_found_for_a_while() -> None:
    table = RequestRegistry(keep_s=60)
    table.add("r1", known := _known())
    table.end("r1")
    assert table.find("r1") is known
    assert not table.running
    table.clear()


async def test_an_ended_request_is_dropped_in_time() -> None:
    table = RequestRegistry(keep_s=0)
    table.add("r1", _known())
    table.end("r1")
    later = asyncio.Event()
    asyncio.get_running_loop().call_later(0.001, later.set)
    await later.wait()
    assert table.find("r1") is None


async def test_only_an_ended_request_can_be_discarded() -> None:
    table = RequestRegistry()
    for request_id in ("r1", "r2"):
        table.add(request_id, _known())
    table.end("r1")
    for request_id in ("r1", "r2", "unknown"):
        table.discard_ended(request_id)
    assert (table.find("r1") is None, table.find("r2") is None) == (True, False)


async def test_the_oldest_requests_are_dropped_if_too_much_is_kept() -> None:
    table = RequestRegistry(keep_bytes=100)
    for request_id in ("r1", "r2", "r3"):
        table.add(request_id, _known(size_bytes=40))
        table.end(request_id)
    assert [table.find(request_id) is None for request_id in ("r1", "r2", "r3")] == [True, False, False]
    table.clear()


async def test_other_content_under_one_id_is_rejected() -> None:
    table = RequestRegistry()
    table.add("r1", _known())
    with pytest.raises(ExistsError, match="already exists with different content"):
        table.find_same("r1", b"other content")
