"""Every log record has the stage, the replica, the request and the attempt."""

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from stagemesh.common.errors import NotFoundError
from stagemesh.common.process import logs
from stagemesh.common.process.logs import LogContextFilter, bind_log_context, bind_process_log_context, set_level
from tests.rpc.call_errors import raises

_PROGRAM = """
import logging
from stagemesh.common.process.logs import bind_log_context, configure_logging
configure_logging()
bind_log_context(stage="thinker", request_id="r1")
logging.getLogger("stagemesh.x").info("größer than %d", 3)
try:
    raise ValueError("gone")
except ValueError:
    logging.getLogger("stagemesh.x").exception("lost")
"""


@pytest.fixture
def process_context() -> Iterator[dict[str, str]]:
    """Yields the values that all records of this process have, and removes what a test has added."""
    former = dict(logs._process)
    yield logs._process
    logs._process.clear()
    logs._process.update(former)


async def test_records_have_what_is_bound() -> None:
    bind_log_context(stage="thinker", replica="thinker-0")
    bind_log_context(request_id="r1", attempt="2")
    assert _seen() == ("thinker", "thinker-0", "r1", "2")


async def test_tasks_do_not_mix_their_requests() -> None:
    async def work(name: str) -> str:
        bind_log_context(request_id=name)
        await asyncio.sleep(0)
        return _seen()[2]

    assert list(await asyncio.gather(work("a"), work("b"))) == ["a", "b"]


async def test_a_record_without_context_says_so() -> None:
    assert _seen() == ("-", "-", "-", "-")


async def test_threads_have_the_context_of_the_process(process_context: dict[str, str]) -> None:
    bind_process_log_context(stage="thinker", replica="thinker-0")
    bind_log_context(request_id="r1")
    with ThreadPoolExecutor() as pool:
        assert pool.submit(_seen).result() == ("thinker", "thinker-0", "-", "-")
    assert process_context["stage"] == "thinker"


def test_records_as_text() -> None:
    first, second, *_ = _logged(STAGEMESH_LOG_FORMAT="text").splitlines()
    assert first.endswith(" INFO thinker/- r1/- stagemesh.x: größer than 3")
    assert second.endswith(" ERROR thinker/- r1/- stagemesh.x: lost")


def test_records_as_json() -> None:
    first, second = map(json.loads, _logged(STAGEMESH_LOG_FORMAT="json").splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "INFO",
        "logger": "stagemesh.x",
        "message": "größer than 3",
        "stage": "thinker",
        "request_id": "r1",
    }
    assert second["exception"].endswith("ValueError: gone")


def test_the_level_at_the_start() -> None:
    assert len(_logged(STAGEMESH_LOG_FORMAT="json", STAGEMESH_LOG_LEVEL="error").splitlines()) == 1


@pytest.mark.parametrize("name", ["STAGEMESH_LOG_FORMAT", "STAGEMESH_LOG_LEVEL"])
def test_an_unknown_setting_is_named(name: str) -> None:
    assert f"{name} is 'loud'; it must be" in _logged(**{name: "loud"})


@pytest.fixture
def logger(request: pytest.FixtureRequest) -> Iterator[logging.Logger]:
    """Yields a logger of this test alone."""
    found = logging.getLogger(f"stagemesh.{request.node.name}.part")
    yield found
    found.setLevel(logging.NOTSET)
    if found.parent is not None:
        found.parent.setLevel(logging.NOTSET)


def test_a_level_is_set_for_a_logger_and_those_below_it(logger: logging.Logger) -> None:
    parent = logger.name.rpartition(".")[0]
    assert set_level(logging.ERROR, logger=parent) < logging.ERROR
    assert not logger.isEnabledFor(logging.WARNING)
    assert set_level(logging.DEBUG, logger=parent) == logging.ERROR
    assert logger.isEnabledFor(logging.DEBUG)


def test_an_unknown_logger_is_an_error() -> None:
    message = r"no logger 'stagemesh.nobody'; it has loggers below .*stagemesh"
    with raises(NotFoundError, reason="UNKNOWN_LOGGER", match=message):
        set_level(logging.DEBUG, logger="stagemesh.nobody")


def _seen() -> tuple[str, ...]:
    record = logging.makeLogRecord({})
    LogContextFilter(absent="-").filter(record)
    return tuple(record.__dict__[name] for name in ("stage", "replica", "request_id", "attempt"))


def _logged(**variables: str) -> str:
    """Returns what a process with these environment variables logs."""
    environment = {"PYTHONUTF8": "1", **variables}
    command = [sys.executable, "-c", _PROGRAM]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False).stderr
