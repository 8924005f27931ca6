import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployment import deployed
from tests.launcher.conftest import TINY
from tests.repository.installed import STAGEMESH, make_environment

# The client's packages, and those that they import themselves.
CLIENT_PACKAGES = {"cython_runtime", "google", "grpc", "grpc_status", "numpy", "stagemesh", "typing_extensions"}

LIST_PACKAGES = """
import json, sys
import stagemesh.client
packages = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
print(json.dumps(sorted(name for name in packages if not name.startswith("_"))))
"""

GENERATE = """
from stagemesh.client import Client

with Client(server) as client:
    print(len(client.generate("hello").result().texts["text"]))
"""

# Each package that the client needs has wheels for all three systems. The client is imported without what Linux has.
ELSEWHERE = """
import asyncio, os, signal, socket, subprocess, sys
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
def python(tmp_path_factory: pytest.TempPathFactory, built_wheel: Path) -> Path:
    """The interpreter of an environment after `pip install stagemesh`."""
    return make_environment(tmp_path_factory.mktemp("base"), extras=[], wheel=built_wheel)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, built_wheel: Path) -> Iterator[str]:
    """The endpoint of a running pipeline of fake stages, started after `pip install 'stagemesh[cli,orchestrator]'`."""
    folder = tmp_path_factory.mktemp("server")
    python = make_environment(folder / "venv", extras=["cli", "orchestrator"], wheel=built_wheel)
    (folder / "tiny.yaml").write_text(TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAGEMESH_HOME", str(folder / "home"))
        with deployed(folder / "tiny.yaml", stagemesh=(str(python), *STAGEMESH)) as deployment:
            yield deployment.endpoint


def run(python: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run([python, *arguments], capture_output=True, text=True, check=False, cwd=python.parent)
    assert ran.returncode == status, ran.stdout + ran.stderr
    return ran


def test_the_client_imports_grpc_protobuf_and_numpy_alone(python: Path) -> None:
    assert set(json.loads(run(python, "-c", LIST_PACKAGES).stdout)) <= CLIENT_PACKAGES


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_the_client_runs_without_the_modules_of_linux(python: Path, server: str, platform: str) -> None:
    assert int(run(python, "-c", ELSEWHERE + GENERATE, platform, server).stdout) > 0


def test_the_base_installation_calls_a_running_pipeline(python: Path, server: str) -> None:
    assert int(run(python, "-c", f"server = {server!r}{GENERATE}").stdout) > 0
