"""Only the user of a process can use the files and folders that it creates, whatever the umask is."""

import os
import sqlite3
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagemesh.client import Client
from stagemesh.jobs.database import Database
from tests.deployment import deployed
from tests.jobs.servers import job_server, write_pipeline

_STAGEMESH = str(Path(sys.executable).with_name("stagemesh"))
_OPEN = ("sh", "-c", 'umask 0; exec "$0" "$@"', _STAGEMESH)
"""The program, started by a user whose files others may read and write."""


@pytest.fixture
def open_umask() -> Iterator[None]:
    umask = os.umask(0)
    yield
    os.umask(umask)


def shared(folder: Path) -> list[str]:
    """Returns the files and folders below a folder that others may use, with their modes."""
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*") if not path.is_symlink()}
    return [f"{path} {mode:o}" for path, mode in modes.items() if mode & 0o077]


def test_a_deployment_creates_only_private_files(tmp_path: Path) -> None:
    home, store = tmp_path / "private" / "home", tmp_path / "store"
    path = write_pipeline(tmp_path, song="{from: singer, media_type: audio/wav, stored: true}")
    store.chmod(0o777)
    upload = tmp_path / "upload.png"
    upload.write_bytes(b"content")
    arguments = ("--jobs", "--tls", str(tmp_path / "private" / "tls"))
    with deployed(path, *arguments, stagemesh=_OPEN, home=home) as up:
        with Client(up.endpoint, tls=tmp_path / "private" / "tls" / "client") as client:
            client.upload(upload)
            assert client.generate("hello", max_tokens=3).result().files
            client.jobs.submit("hello", request_id="film", max_tokens=3)
            assert [job.state for job in client.jobs.watch("film")][-1] == "succeeded"
        assert list((tmp_path / "private").rglob("*.sqlite3*"))
        assert {each.name for each in store.iterdir()} >= {"uploads", "outputs"}
        assert [*shared(tmp_path / "private"), *shared(store)] == []


def test_a_database_that_others_may_read_becomes_private(tmp_path: Path, open_umask: None) -> None:
    database = tmp_path / "jobs.sqlite3"
    sqlite3.connect(database).close()
    database.touch()
    assert stat.S_IMODE(database.stat().st_mode) & 0o044
    with job_server(tmp_path, "127.0.0.1:1") as server:
        server.submit(job_id="one")
        files = list(tmp_path.glob("jobs.sqlite3*"))
        assert len(files) == 3
        assert [stat.S_IMODE(each.stat().st_mode) for each in files] == [0o600] * 3


def test_the_folder_of_the_database_is_private(tmp_path: Path, open_umask: None) -> None:
    url = f"sqlite:///{tmp_path}/new/jobs.sqlite3"
    Database(url).close()
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
