"""A PostgreSQL server of a test, on the loopback interface and with a folder of its own."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psycopg
from psycopg import sql

from stagemesh.cli.launcher.ports import PortPicker

_USER = "postgres"


class Postgres:
    """A PostgreSQL server that can be stopped and started."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, PortPicker().pick()
        self.url = self._url("postgres")
        _run("initdb", "--pgdata", str(folder / "data"), "--username", _USER, "--auth", "trust", "--no-sync")

    def start(self) -> None:
        """Starts the server, and waits until it accepts connections."""
        options = f"-p {self._port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self._folder}"
        log = str(self._folder / "log")
        _run("pg_ctl", "start", "--wait", "--pgdata", str(self._folder / "data"), "--log", log, "--options", options)

    def kill(self) -> None:
        """Stops the server at once, as a crash does."""
        _run("pg_ctl", "stop", "--mode", "immediate", "--pgdata", str(self._folder / "data"))

    @contextmanager
    def new_database(self) -> Iterator[None]:
        """Creates a database, which `url` names within the block. The server must run before and after the block."""
        name = f"jobs{uuid4().hex}"
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        self.url = self._url(name)
        yield
        self.url = self._url("postgres")

    def _url(self, database: str) -> str:
        return f"postgresql://{_USER}@127.0.0.1:{self._port}/{database}"


@contextmanager
def postgres() -> Iterator[Postgres]:
    """Runs a PostgreSQL server."""
    # The folders of pytest are not accessible to the other user.
    folder = Path(tempfile.mkdtemp(prefix="stagemesh-postgres-"))
    try:
        if os.geteuid() == 0:
            shutil.chown(folder, _USER)
        server = Postgres(folder)
        server.start()
        try:
            yield server
        finally:
            if (folder / "data" / "postmaster.pid").exists():
                server.kill()
    finally:
        shutil.rmtree(folder)


def _run(program: str, *arguments: str) -> None:
    # PostgreSQL refuses to run as root.
    user = _USER if os.geteuid() == 0 else None
    subprocess.run([_program(program), *arguments], check=True, user=user, cwd="/", stdout=subprocess.DEVNULL)


def _program(name: str) -> str:
    """Returns the path of a program of PostgreSQL. Debian keeps the servers out of PATH."""
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    found = shutil.which(name) or (str(installed[-1]) if installed else None)
    assert found is not None, f"{name} is not installed; install the package postgresql"
    return found
