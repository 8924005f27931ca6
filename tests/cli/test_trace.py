"""`stagemesh trace` for requests of a running pipeline."""

import json
from pathlib import Path

from stagemesh.client import Text
from stagemesh.common.errors import ExitCode
from tests.cli.commands import Ran, invoke
from tests.deployment import Deployment


def _trace(relays_up: Deployment, *arguments: str) -> Ran:
    return invoke("trace", "--server", relays_up.admin_endpoint, *arguments)


def test_the_timeline_of_a_request_that_has_ended(relays_up: Deployment, tmp_path: Path) -> None:
    with relays_up.client() as client:
        client.generate("hello", request_id="ended").result()
    file = tmp_path / "trace.json"
    lines = _trace(relays_up, "ended", "-o", str(file)).output.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["request", "queue"]
    assert {line.split()[0] for line in lines if "█" in line} >= {"request", "source", "relay", "frames", "first"}
    events = json.loads(file.read_text())["traceEvents"]
    threads = {each["args"]["name"]: each["tid"] for each in events if each["ph"] == "M"}
    assert set(threads) == {"orchestrator", "source-0", "relay-0", "frames-0"}
    spans = [each for each in events if each["ph"] == "X"]
    whole = next(each for each in spans if each["name"] == "request")
    assert all(0 <= each["ts"] <= each["ts"] + each["dur"] <= whole["dur"] + 1 for each in spans)
    assert next(each for each in spans if each["name"] == "relay")["args"]["relay->frames.chunks"] == 30


def test_the_recovery_of_a_killed_stage_is_an_attempt(relays_up: Deployment) -> None:
    with relays_up.client() as client:
        events = iter(client.generate("hello", request_id="killed"))
        assert any(isinstance(event, Text) for event in events)
        relays_up.kill("relay-0")
        assert list(events)
    spans = json.loads(_trace(relays_up, "killed", "--json").stdout)
    attempts = [span for span in spans if span["attributes"].get("stage") == "relay"]
    assert [span["name"] for span in attempts] == ["relay", "recovery of relay", "relay, attempt 2"]
    assert attempts[0]["error"]
    assert not attempts[2]["error"]
    assert "relay, attempt 2" in _trace(relays_up, "killed").stdout


def test_an_unknown_request_and_an_unwritable_file(relays_up: Deployment, tmp_path: Path) -> None:
    assert _trace(relays_up, "nobody").exit_code == ExitCode.NOT_FOUND
    with relays_up.client() as client:
        client.generate("hello", request_id="known").result()
    ran = _trace(relays_up, "known", "-o", str(tmp_path / "missing" / "trace.json"))
    ran.check(ExitCode.USAGE, "cannot be written")
