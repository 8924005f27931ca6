"""Every log line has the stage and the request."""

import asyncio
import logging

from stagemesh.common.logs import LogContextFilter, bind_log_context


async def test_lines_carry_stage_and_request() -> None:
    bind_log_context(stage="thinker")
    bind_log_context(request_id="r1")
    assert _seen() == ("thinker", "r1")


async def test_tasks_do_not_mix_their_requests() -> None:
    async def work(name: str) -> tuple[str, str]:
        bind_log_context(request_id=name)
        await asyncio.sleep(0)
        return _seen()

    seen = await asyncio.gather(work("a"), work("b"))
    assert [request for _, request in seen] == ["a", "b"]


async def test_unbound_line_says_so() -> None:
    assert _seen() == ("-", "-")


def _seen() -> tuple[str, str]:
    record = logging.makeLogRecord({})
    LogContextFilter().filter(record)
    return record.__dict__["stage"], record.__dict__["request_id"]
