"""The clients in Go (examples/go): an answer is streamed, and survives lost connections and orchestrators."""

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from stagemesh.common.errors import InternalError
from tests.children import killed_at_end
from tests.client.scripted import Pause, admitted, ended, finished, served, text
from tests.deployment import Deployment
from tests.repository.code_blocks import read_blocks
from tests.system.breakable_relay import breakable_relay

EXAMPLE = Path(__file__).parents[2] / "examples" / "go"
PROGRAM = (str(EXAMPLE / "bin" / "reattach"),)
GO, GOFMT = (shutil.which(name) or name for name in ("go", "gofmt"))
STEPS = 30


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """Skips the tests without Go. Fails them if the programs are not built, or older than their sources."""
    if shutil.which("go") is None or shutil.which("protoc-gen-go-grpc") is None:
        pytest.skip("needs Go with gRPC: run `make go`, or install the packages of examples/go/README.md")
    stamp = EXAMPLE / "bin" / ".stamp"
    is_built = stamp.exists() and all(each.stat().st_mtime <= stamp.stat().st_mtime for each in EXAMPLE.glob("*/*.go"))
    assert is_built, "examples/go is not built: run `make go`"


def steps_of(text: str) -> list[int]:
    """Returns the steps of which the text of the fake engine consists."""
    assert re.fullmatch(r"(Step \d+ is [0-9a-f]{8}\. )+", text)
    return [int(step) for step in re.findall(r"Step (\d+)", text)]


def go_environment() -> Mapping[str, str]:
    """Returns the environment in which Go finds the generated code and the packages of Debian."""
    return {**os.environ, "GO111MODULE": "off", "GOPATH": f"{EXAMPLE / 'gen'}:/usr/share/gocode"}


def test_the_example_of_the_documents_prints_the_answer(relays_up: Deployment, tmp_path: Path) -> None:
    (block,) = [block for block in read_blocks("docs/clients.md") if block.language == "go"]
    assert block.code == (EXAMPLE / "hello" / "main.go").read_text()
    (tmp_path / "main.go").write_text(block.code.replace("127.0.0.1:7780", relays_up.endpoint))
    subprocess.run([GO, "build", "-o", "hello", "main.go"], cwd=tmp_path, env=go_environment(), check=True)
    printed = subprocess.run([tmp_path / "hello"], capture_output=True, text=True, check=True, timeout=30).stdout
    assert steps_of(printed) == list(range(STEPS))


def test_the_programs_are_formatted() -> None:
    assert subprocess.run([GOFMT, "-l", "."], cwd=EXAMPLE, capture_output=True, check=True).stdout == b""


@pytest.mark.parametrize("loss", ["broken connection", "killed orchestrator"])
def test_a_lost_answer_continues(relays_up: Deployment, loss: str) -> None:
    with breakable_relay(relays_up.endpoint) as way:
        lose: Callable[[], None] = way.cut if loss == "broken connection" else lambda: relays_up.kill("orchestrator")
        command = [*PROGRAM, way.endpoint, "hello"]
        with killed_at_end(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as client:
            assert client.stdout is not None
            beginning = client.stdout.read(20)
            lose()
            received = beginning + client.stdout.read()
    assert client.returncode == 0
    assert steps_of(received) == list(range(STEPS))


async def test_the_next_call_says_what_has_arrived() -> None:
    async with served() as orchestrator:
        orchestrator.scripts.extend(
            [[admitted(seed=9), text("Zoë😀"), Pause.BREAK], [admitted(seed=9), text("!"), ended(), finished()]]
        )
        client = await asyncio.create_subprocess_exec(
            *PROGRAM, orchestrator.endpoint, "hello", stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(30):
            printed, _ = await client.communicate()
        first, second = orchestrator.requests
    assert printed.decode() == "Zoë😀!"
    assert {each.name: each.position for each in second.next_positions} == {"text": 8}
    assert (second.parameters.seed, second.earlier_calls, second.generation) == (9, 1, "g")
    assert (second.request_id, second.linger_s) == (first.request_id, 30)


async def test_an_error_of_the_request_is_final() -> None:
    async with served() as orchestrator:
        orchestrator.scripts.append([admitted(), InternalError("out of luck")])
        client = await asyncio.create_subprocess_exec(
            *PROGRAM, orchestrator.endpoint, "hello", stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(30):
            _, error = await client.communicate()
    assert client.returncode == 1
    assert "out of luck" in error.decode()
    assert len(orchestrator.requests) == 1
