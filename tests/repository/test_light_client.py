import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.deployment import deployed
from tests.launcher.conftest import TINY
from tests.repository.commands import run as run_command
from tests.repository.installed import STAGEMESH

# The client's packages, and those that they import themselves.
CLIENT_PACKAGES = {"cython_runtime", "google", "grpc", "grpc_status", "numpy", "stagemesh", "typing_extensions"}

LIST_PACKAGES = """
import json, sys
import stagemesh.client
packages = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
print(json.dumps(sorted(name for name in packages if not name.startswith("_"))))
"""

# Its own modules and those of its packages. The time is the processor time.
MAX_MODULES, MAX_IMPORT_S = 420, 0.4
MEASURE_IMPORT = """
import json, sys, time
began_s = time.process_time()
import stagemesh.client
print(json.dumps([time.process_time() - began_s, len(sys.modules)]))
"""

GENERATE = """
from stagemesh.client import Client

with Client(server) as client:
    print(len(client.generate("hello").result().texts["text"]))
"""

# Each package that the client needs has wheels for all three systems. The client is imported without what Linux has.
ELSEWHERE = """
import asyncio, os, signal, socket, subprocess, sys, tempfile
import google.protobuf.message, google.rpc.status_pb2, grpc.aio, grpc_status, numpy

platform, server = sys.argv[1:]
MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty", "uvloop"}
MODULES |= {"_posixshmem", "_posixsubprocess"}
NAMES = {os: ("eventfd", "fork", "geteuid", "getuid", "memfd_create", "posix_fallocate", "sched_getaffinity")}
NAMES |= {signal: ("SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1", "pthread_kill"), socket: ("AF_UNIX", "SCM_RIGHTS")}

class Refusal:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"{platform} has no module {name}", name=name)

for name in MODULES:
    sys.modules.pop(name, None)
for module, names in NAMES.items():
    for name in names:
        delattr(module, name)
sys.meta_path.insert(0, Refusal)
sys.platform = platform
try:
    import fcntl
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("the test does not refuse fcntl")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, environment: Callable[..., Path]) -> Iterator[str]:
    """The endpoint of a running pipeline of fake stages, started after `pip install 'stagemesh[cli,orchestrator]'`."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "tiny.yaml").write_text(TINY)
    program = (str(environment("cli", "orchestrator")), *STAGEMESH)
    with deployed(folder / "tiny.yaml", stagemesh=program, home=folder / "home") as deployment:
        yield deployment.endpoint


@pytest.fixture(scope="module")
def run(environment: Callable[..., Path]) -> Callable[..., str]:
    """Returns a function that runs a program after `pip install stagemesh`, and returns what it prints."""
    python = environment()

    def run(program: str, *arguments: str) -> str:
        return run_command(str(python), "-c", program, *arguments, folder=python.parent)

    return run


def test_the_client_imports_grpc_protobuf_and_numpy_alone(run: Callable[..., str]) -> None:
    assert set(json.loads(run(LIST_PACKAGES))) <= CLIENT_PACKAGES


def test_the_client_is_imported_at_once(run: Callable[..., str]) -> None:
    figures = [json.loads(run(MEASURE_IMPORT)) for _ in range(3)]
    seconds, modules = min(seconds for seconds, _ in figures), figures[0][1]
    assert modules <= MAX_MODULES
    assert seconds <= MAX_IMPORT_S


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_the_client_runs_without_the_modules_of_linux(run: Callable[..., str], server: str, platform: str) -> None:
    assert int(run(ELSEWHERE + GENERATE, platform, server)) > 0


def test_the_base_installation_calls_a_running_pipeline(run: Callable[..., str], server: str) -> None:
    assert int(run(f"server = {server!r}{GENERATE}")) > 0
