"""`stagemesh conformance`: what it prints and writes, and its exit status."""

import json
import socket
from pathlib import Path

import pytest

from stagemesh.common.errors import ExitCode
from tests.cli.commands import invoke, stagemesh
from tests.conformance.stages import python_stage
from tests.credentials import issue

QUICK = ("--case", "joining.identity", "--case", "joining.protocol")


def test_list_names_each_case_with_its_rule() -> None:
    listed = json.loads(invoke("conformance", "--list", "--json", "-").stdout)
    assert len(listed) >= 300
    assert {"name", "level", "plays", "rule"} == listed[0].keys()
    text = invoke("conformance", "--list", "--case", "consumer.gap").stdout
    assert "consumer.gap" in text
    assert "producer.hello" not in text


def test_level_limits_the_cases() -> None:
    levels = {
        each["level"] for each in json.loads(invoke("conformance", "--list", "--level", "2", "--json", "-").stdout)
    }
    assert levels == {1, 2}


async def test_results_are_written_as_json(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    async with python_stage(tmp_path, "relay") as endpoint:
        ran = await stagemesh("conformance", endpoint, "--stage", "relay", *QUICK, "--json", str(path))
        again = await stagemesh("conformance", endpoint, *QUICK, "--json", "-")
    assert (ran.exit_code, ran.stdout.strip()) == (0, "2 passed")
    document = json.loads(path.read_text())
    assert (document["stage"], document["counts"]) == ("relay", {"passed": 2})
    assert [each["name"] for each in document["cases"]] == ["joining.identity", "joining.protocol"]
    assert json.loads(again.stdout)["counts"] == {"passed": 2}


async def test_failure_says_what_was_expected_and_what_came(tmp_path: Path) -> None:
    defect = "from stagemesh.connectors.flow import inlet_attempt as m; m.MAX_RESYNCS = 9"
    async with python_stage(tmp_path, "relay", defect=defect) as endpoint:
        ran = await stagemesh("conformance", endpoint, "--case", "consumer.resync-limit*")
    assert ran.exit_code == ExitCode.FAILED
    assert "failed: consumer.resync-limit\n" in ran.stderr
    lines = [line.strip().partition(":")[0] for line in ran.stdout.splitlines() if line]
    failed = "consumer.resync-limit (level 1)"
    assert lines == [failed, "rule", "expected", "came", "consumer 1", "step 1", "stream 1", "1 failed, 1 passed"]
    assert "hello of 'relay-0'" in ran.stdout


async def test_requests_use_the_given_inputs_and_options(tmp_path: Path) -> None:
    async with python_stage(tmp_path, "relay") as endpoint:
        good = await stagemesh(
            "conformance", endpoint, "--case", "steps.good-request", "--input", "text=uint8[bytes]", "--timeout", "20"
        )
        bad = await stagemesh("conformance", endpoint, "--case", "steps.good-request", "--option", "pace=0.5")
        wrong = await stagemesh("conformance", endpoint, *QUICK, "--input", "text=words")
    assert good.exit_code == 0
    assert "UNKNOWN_OPTION" in bad.stdout
    wrong.check(ExitCode.USAGE, "'words' is not a tensor type")


async def test_peers_have_a_certificate(tmp_path: Path) -> None:
    own = issue(tmp_path, "stage/relay/relay-0")
    peers = issue(tmp_path, "orchestrator/main", "stage/peers/conformance*")
    async with python_stage(tmp_path, "relay", tls=str(own)) as endpoint:
        cases = ("--case", "steps.good-request", "--case", "consumer.welcome", "--case", "producer.*OK")
        ran = await stagemesh("conformance", endpoint, "--tls", str(peers), *cases)
    assert ran.stdout.strip() == "3 passed", ran


async def test_another_stage_is_refused(tmp_path: Path) -> None:
    async with python_stage(tmp_path, "relay") as endpoint:
        ran = await stagemesh("conformance", endpoint, "--stage", "vocoder", *QUICK)
    ran.check(ExitCode.USAGE, "belongs to the stage 'relay', not 'vocoder'")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("HERE", *QUICK), ExitCode.UNAVAILABLE, "start the stage, or correct HOST:PORT"),
        (("HERE", "--case", "consumer.none"), ExitCode.USAGE, "no case matches"),
        ((), ExitCode.USAGE, "give the address of the stage"),
        (("HERE", "--tls", "/nowhere"), ExitCode.USAGE, "cannot be read"),
    ],
)
def test_what_cannot_be_run_has_an_error(arguments: tuple[str, ...], code: ExitCode, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    ran = invoke("conformance", *(endpoint if each == "HERE" else each for each in arguments))
    ran.check(code, words)
    assert "--server" not in ran.stderr
