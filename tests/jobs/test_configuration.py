import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from requirements.lock import JOBS_EXTRAS

from stagemesh.common.errors import ExitCode
from stagemesh.common.process.config import dump_config
from stagemesh.common.process.media_config import MediaConfig
from stagemesh.jobs.config import JobServerConfig
from tests.deployment import eventually
from tests.jobs.servers import RUNNING, job_server, make_server
from tests.repository.installed import STAGEMESH

pytestmark = pytest.mark.timeout(180)

NOWHERE = "127.0.0.1:1"
"""The address of an orchestrator that does not exist."""
PASSWORD = "p@ss:word/x"  # noqa: S105 - of no account


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"database": "mysql://host/jobs"}, "neither sqlite:///PATH nor postgresql://"),
        ({"database": "sqlite:////a", "database_file": "/url"}, "both set; keep one of them"),
    ],
)
def test_a_wrong_database_is_an_error_of_the_config(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JobServerConfig("spoken", NOWHERE, [NOWHERE], MediaConfig("/store"), **settings)


def test_the_url_of_the_database_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text(f"sqlite:///{tmp_path / 'other.sqlite3'}\n")
    with job_server(tmp_path, NOWHERE, database="", database_file=str(file)) as server:
        server.submit(job_id="kept")
        assert server.get("kept").job_id == "kept"
    with closing(sqlite3.connect(tmp_path / "other.sqlite3")) as connection:
        assert connection.execute("SELECT job_id FROM jobs").fetchall() == [("kept",)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "url cannot be read: No such file or directory; name a file that contains the URL"),
        (f"mysql://jobs:{PASSWORD}@host/jobs", "neither sqlite:///PATH nor postgresql://"),
        (f"postgresql://jobs:{PASSWORD}@host/jobs", "cannot be parsed; write postgresql://USER:PASSWORD@HOST/NAME"),
    ],
    ids=["missing", "other database", "password without escapes"],
)
def test_a_wrong_url_in_a_file_ends_the_process_without_showing_it(
    content: str | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "url"
    if content is not None:
        file.write_text(content)
    with make_server(tmp_path, NOWHERE, database="", database_file=str(file)) as server:
        server.launch()
        assert server.process is not None
        assert server.process.wait(timeout=60) == ExitCode.USAGE
        log = server.log.read_text()
    assert message in log
    assert not [part for part in ("p@ss", ":word", "'word", "Traceback") if part in log]


def test_the_command_line_names_the_process_with_the_packages_of_the_image(
    tmp_path: Path, environment: Callable[..., Path]
) -> None:
    python = environment(*JOBS_EXTRAS.split(","))
    with make_server(tmp_path, NOWHERE, name="other") as server:
        path = tmp_path / "jobs.json"
        path.write_bytes(dump_config(server.config))
        server.process = subprocess.Popen([python, *STAGEMESH, "serve", "jobs", str(path), "--name=pod-7"])
        eventually(server.is_serving, timeout_s=90)
        server.submit(job_id="claimed")
        server.wait("claimed", RUNNING)
        with closing(sqlite3.connect(tmp_path / "jobs.sqlite3")) as connection:
            assert connection.execute("SELECT worker FROM jobs").fetchall() == [("pod-7",)]


def test_a_process_without_its_database_is_alive_but_not_ready(tmp_path: Path) -> None:
    with make_server(tmp_path, NOWHERE, database=f"postgresql://jobs@{NOWHERE}/jobs") as server:
        server.launch()
        eventually(lambda: server.is_serving("liveness"), timeout_s=90)
        assert not server.is_serving()
