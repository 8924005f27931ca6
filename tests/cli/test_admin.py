"""Tests `stagemesh admin` and `stagemesh top` against a running pipeline."""

import io
import json
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from rich.console import Console, RenderableType

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.cli.operation import admin_connection as admin_client
from stagemesh.cli.operation.admin import Condition, unmet_cause
from stagemesh.cli.operation.top import top_view
from stagemesh.cli.operation.views import REQUESTS, attempt_text, moments, request_view
from stagemesh.cli.terminal.tables import make_table
from stagemesh.client import Admitted, Client, Text
from stagemesh.common.errors import CancelledRequestError, ExitCode
from stagemesh.v1 import admin_pb2, chunk_pb2, orchestrator_pb2, stage_pb2
from stagemesh.v1.orchestrator_pb2 import ReplicaStatus
from tests.cli.commands import COMMAND, Ran, invoke
from tests.deployment import Deployment, deployed, eventually
from tests.system.pipelines import pipeline_file

PIPELINE = """\
pipeline: rehearsal
stages:
  write: {engine: fake, function: source, replicas: 2, options: {steps: 20, step_s: 0.02}}
  speak: {engine: fake, function: relay, replicas: 2}
  sound: {engine: fake, function: relay}
edges:
  - {from: write, to: speak}
  - {from: speak, to: sound}
outputs: {text: write, audio: sound}
"""
_LONG = 100_000


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("admin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAGEMESH_HOME", str(folder / "home"))
        patch.setenv("COLUMNS", "200")
        with deployed(pipeline_file(folder, PIPELINE)) as running:
            yield running


def _admin(running: Deployment, *arguments: str) -> Ran:
    return invoke("admin", *arguments, "--server", running.admin_endpoint)


def _json(running: Deployment, *arguments: str) -> Any:
    return [json.loads(line) for line in _admin(running, *arguments, "--json").output.splitlines()]


class _Request:
    """A request that runs until it is cancelled."""

    def __init__(self, client: Client, name: str) -> None:
        self._response_stream = client.generate("hello", request_id=name, max_tokens=_LONG)
        self._begun = threading.Event()
        self._cancelled = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert self._begun.wait(20)

    def _read(self) -> None:
        try:
            for event in self._response_stream:
                if isinstance(event, Text):
                    self._begun.set()
        except CancelledRequestError:
            self._cancelled = True

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()
        assert self._cancelled, "the request was not cancelled"


@pytest.fixture
def long_request(running: Deployment) -> Iterator[str]:
    with running.client() as client:
        name = f"long-{uuid.uuid4().hex}"
        request = _Request(client, name)
        yield name
        _admin(running, "cancel", name)
        request.join()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("pipelines", ["rehearsal", "ready", "0 of 64"]),
        ("stages", ["write", "speak", "sound", "2 of 2", "1 of 1"]),
        ("replicas", ["write-0", "write-1", "speak-0", "speak-1", "sound-0", "ready"]),
        ("edges", ["write->speak", "speak->sound", "shm"]),
        ("requests", ["request", "at work"]),
    ],
)
def test_each_list_is_a_table_or_json(running: Deployment, command: str, words: list[str]) -> None:
    table = _admin(running, command).output
    assert [word for word in words if word not in table] == []
    (document,) = _json(running, command)
    assert document["next_page_token"] == ""
    assert isinstance(document[command], list)


def test_a_page_prints_the_token_of_the_next_page(running: Deployment) -> None:
    token = re.search(r"--page-token (\S+)", _admin(running, "replicas", "--page-size", "3").stderr)
    assert token is not None
    (document,) = _json(running, "replicas", "--page-size", "3", "--page-token", token[1])
    assert [replica["name"] for replica in document["replicas"]] == ["speak-1", "sound-0"]


def test_all_pages_of_a_list_can_be_printed_at_once(running: Deployment) -> None:
    (document,) = _json(running, "replicas", "--page-size", "2", "--all")
    assert document["next_page_token"] == ""
    names = [replica["name"] for replica in document["replicas"]]
    assert names == ["write-0", "write-1", "speak-0", "speak-1", "sound-0"]
    ran = _admin(running, "replicas", "--page-size", "2", "--all")
    assert ([name for name in names if name not in ran.stdout], ran.stderr) == ([], "")


def _watched(*arguments: str, lines: int) -> list[str]:
    """Returns the first lines of a command that runs until Ctrl-C."""
    with subprocess.Popen([*COMMAND, *arguments, "--watch", "--interval", "0.2"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        shown = [process.stdout.readline().decode() for _ in range(lines)]
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == ExitCode.INTERRUPTED
    return shown


def test_a_watched_list_is_printed_again_and_again_as_json(running: Deployment) -> None:
    lines = _watched("admin", "requests", "--json", "--server", running.admin_endpoint, lines=2)
    assert [list(json.loads(line)) for line in lines] == [["requests", "next_page_token"]] * 2


def test_a_watched_list_is_printed_again_and_again_as_text(running: Deployment) -> None:
    header, *replicas, again = _watched("admin", "replicas", "--server", running.admin_endpoint, lines=7)
    assert header.split()[:3] == again.split()[:3] == ["replica", "stage", "endpoint"]
    assert len(replicas) == 5


def test_the_stages_that_clients_see_can_be_watched(running: Deployment) -> None:
    lines = _watched("stages", "--json", "--server", running.endpoint, lines=2)
    assert [json.loads(line)["pipeline"] for line in lines] == ["rehearsal"] * 2


def test_names_of_replicas_and_requests_are_completed(running: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_STAGEMESH_COMPLETE", "complete_bash")
    monkeypatch.setenv("STAGEMESH_ADMIN_SERVER", running.admin_endpoint)
    monkeypatch.setenv("COMP_WORDS", "stagemesh admin drain wri")
    monkeypatch.setenv("COMP_CWORD", "3")
    command = Path(sys.executable).with_name("stagemesh")
    ran = subprocess.run([command], capture_output=True, text=True, check=False, timeout=20)
    assert ran.stdout.split() == ["write", "write-0", "write-1"], ran.stderr


def test_json_is_the_json_mapping_of_protobuf(running: Deployment) -> None:
    (document,) = _json(running, "replicas", "--stage", "sound")
    (replica,) = document["replicas"]
    assert ParseDict(document, admin_pb2.ListReplicasResponse()).replicas[0].name == "sound-0"
    assert (replica["state"], replica["planned"]) == ("REPLICA_STATE_READY", 0)
    assert replica["load"]["arena_used_bytes"] == "0"


def test_a_running_request_shows_its_timeline_and_its_flows(running: Deployment, long_request: str) -> None:
    shown = _admin(running, "request", long_request).output
    for words in (f"{long_request}  running", "admitted and planned", "sent its first output", "write->speak", "shm"):
        assert words in shown
    assert "without a name" in _admin(running, "pipelines").stdout, "callers are listed below their pipeline"
    (document,) = _json(running, "request", long_request)
    assert {(flow["edge"], flow["consumer"]) for flow in document["flows"]} >= {("speak->sound", "sound-0")}
    assert {step["stage"] for step in document["steps"]} == {"write", "speak", "sound"}


def test_requests_are_filtered_by_stage_and_state(running: Deployment, long_request: str) -> None:
    (there,) = _json(running, "requests", "--on", "sound")
    (nowhere,) = _json(running, "requests", "--on", "sound", "--state", "failed")
    assert [request["request_id"] for request in there["requests"]] == [long_request]
    assert nowhere["requests"] == []
    assert _admin(running, "cancel", long_request).exit_code == 0
    _admin(running, "cancel", long_request).check(ExitCode.REFUSED, "has already been cancelled")
    (ended,) = _json(running, "requests", "--state", "cancelled")
    assert long_request in [request["request_id"] for request in ended["requests"]]


@pytest.mark.parametrize(
    ("arguments", "code", "said", "remedy"),
    [
        (("drain", "sound-0"), ExitCode.REFUSED, "without a ready replica (it has no other replica)", "--force"),
        (("restart", "sound"), ExitCode.REFUSED, "without a ready replica", "--force"),
        (("drain", "nobody"), ExitCode.NOT_FOUND, "unknown replica or stage 'nobody'", "admin replicas"),
        (("cancel", "nobody"), ExitCode.NOT_FOUND, "unknown request 'nobody'", "admin requests"),
        (("request", "nobody"), ExitCode.NOT_FOUND, "unknown request 'nobody'", "admin requests"),
        (("probe", "a->b"), ExitCode.NOT_FOUND, "unknown edge 'a->b'; edges: write->speak", "admin edges"),
        (("cache", "write-0"), ExitCode.FAILED, "engine fake of stage write does not have the ability", ""),
        (("lora", "list", "write"), ExitCode.FAILED, "does not have the ability adapters", ""),
        (("profile", "start", "write-1"), ExitCode.FAILED, "does not have the ability profile", ""),
        (("cache", "write-1"), ExitCode.FAILED, "does not have the ability", ""),
        (("stages", "--page-token", "x"), ExitCode.USAGE, "page_token 'x' is not from a previous page", ""),
    ],
)
def test_a_failed_command_prints_the_cause_and_the_remedy(
    running: Deployment, arguments: tuple[str, ...], code: ExitCode, said: str, remedy: str
) -> None:
    _admin(running, *arguments).check(code, said, remedy)


def test_the_replicas_of_a_stage_are_found_on_every_page(running: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_client, "_PAGE", 2)
    assert "engine fake of stage sound does not have the ability" in _admin(running, "cache", "sound").stderr


def test_an_unreachable_server_is_reported_with_a_remedy() -> None:
    invoke("admin", "stages", "--server", "127.0.0.1:1").check(ExitCode.UNAVAILABLE, "stagemesh up")


def test_an_edge_is_probed_between_all_pairs(running: Deployment) -> None:
    (document,) = _json(running, "probe", "write->speak")
    assert len(document["edge"]["links"]) == 4
    (one,) = _json(running, "probe", "write->speak", "--producer", "write-1", "--consumer", "speak-0")
    assert [(link["producer"], link["connector"]) for link in one["edge"]["links"]] == [("write-1", "CONNECTOR_SHM")]


def test_a_drained_replica_gets_no_new_requests(running: Deployment) -> None:
    assert _admin(running, "drain", "write-0", "--wait").exit_code == 0
    with running.client() as client:
        streams = [client.generate("hello") for _ in range(3)]
        admitted = [next(event for event in stream if isinstance(event, Admitted)) for stream in streams]
    (document,) = _json(running, "resume", "write-0")
    assert [each.replicas["write"] for each in admitted] == ["write-1"] * 3
    assert [replica["state"] for replica in document["replicas"]] == ["REPLICA_STATE_READY"]


def _writers(running: Deployment, request: str) -> dict[str, bool]:
    """Returns whether the step of a request has ended, by replica of the stage `write` on which it has run."""
    (document,) = _json(running, "request", request)
    writing = (step for step in document["steps"] if step["stage"] == "write")
    return {step["replica"]: step.get("ended_s") is not None for step in writing}


def _wait(running: Deployment, *arguments: str, timeout_s: float = 20.0) -> Ran:
    return _admin(running, "wait", *arguments, "--timeout", str(timeout_s))


@pytest.mark.parametrize("target", [(), ("write",), ("write-1",)])
def test_a_wait_for_readiness_ends_at_once(running: Deployment, target: tuple[str, ...]) -> None:
    ran = _wait(running, *target)
    assert (ran.exit_code, f"{(*target, 'the pipeline')[0]} is ready after 0." in ran.stdout) == (0, True), ran.stderr
    ran = _wait(running, *target, "--json")
    assert json.loads(ran.stdout)["condition"] == "ready"


def test_a_wait_for_a_drain_ends_with_the_last_request(running: Deployment, long_request: str) -> None:
    (there,) = _writers(running, long_request)
    assert _admin(running, "drain", there).exit_code == 0
    try:
        assert _wait(running, there, "--for", "drained", timeout_s=0.5).exit_code == ExitCode.TIMEOUT
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(_wait, running, there, "--for", "drained")
            with running.client() as client:
                client.cancel(long_request)
            assert waiting.result(20).exit_code == 0
    finally:
        _admin(running, "resume", there)
    assert _wait(running, there).exit_code == 0


@pytest.mark.parametrize(
    ("target", "condition", "code"),
    [
        ("nobody", "ready", ExitCode.TIMEOUT),
        ("nobody", "drained", ExitCode.NOT_FOUND),
        ("nobody", "gone", 0),
        ("write", "gone", ExitCode.TIMEOUT),
    ],
)
def test_a_wait_for_an_unmet_condition_fails(running: Deployment, target: str, condition: str, code: int) -> None:
    ran = _wait(running, target, "--for", condition, timeout_s=0.5 if code == ExitCode.TIMEOUT else 20.0)
    assert (ran.exit_code, "Traceback" in ran.stderr) == (code, False), ran.stderr


def test_a_wait_begins_before_the_server_and_ends_after_it(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = PortPicker().pick()
    monkeypatch.setenv("STAGEMESH_ADMIN_SERVER", f"127.0.0.1:{port}")
    wait = [*COMMAND, "admin", "wait", "--timeout", "60"]
    with subprocess.Popen(wait) as ready, deployed(tiny, "--admin-port", str(port)):
        assert ready.wait(30) == 0
        gone = subprocess.Popen([*wait, "--for", "gone"])
    assert gone.wait(30) == 0


def _printed(*views: RenderableType) -> str:
    """Returns the text of views on a terminal of 200 columns."""
    file = io.StringIO()
    Console(file=file, width=200).print(*views)
    return file.getvalue()


@pytest.mark.parametrize(
    ("status", "shown", "hidden"),
    [
        ({}, [], ["work waits", "audio at risk"]),
        ({"queued_s": 12.0}, ["work waits", "12.00 s"], ["audio at risk"]),
        ({"playout_at_risk": 3}, ["audio at risk"], ["work waits"]),
    ],
)
def test_top_shows_scaling_signals_above_zero(status: dict[str, float], shown: list[str], hidden: list[str]) -> None:
    stages = [admin_pb2.StageStatus(name="idle"), ParseDict(status, admin_pb2.StageStatus(name="busy"))]
    snapshot = admin_pb2.WatchPipelineResponse(stages=stages)
    table = _printed(top_view(snapshot, snapshot))
    assert [text for text in (*shown, *hidden) if text in table] == shown


def test_a_pipeline_whose_server_does_not_answer_is_gone() -> None:
    assert invoke("admin", "wait", "--for", "gone", "--server", "127.0.0.1:1").exit_code == 0


@pytest.mark.parametrize(
    ("target", "condition", "cause"),
    [
        ("", Condition.READY, "a-0 is unreachable, a-1 is loading (weights), b-1 is draining, d-0 is draining"),
        ("a", Condition.READY, "a-0 is unreachable, a-1 is loading (weights)"),
        ("b-0", Condition.READY, ""),
        ("c", Condition.READY, "the server knows no replica and no stage with replicas of this name"),
        ("b", Condition.DRAINED, "b-0 is ready, b-1 runs 2 requests"),
        ("d", Condition.DRAINED, ""),
        ("a-0", Condition.GONE, ""),
        ("a", Condition.GONE, "a-1 is loading (weights)"),
        ("c", Condition.GONE, ""),
        ("", Condition.GONE, "the server answers"),
    ],
)
def test_a_condition_that_is_not_met_has_a_cause(target: str, condition: Condition, cause: str) -> None:
    load = stage_pb2.WatchLoadResponse(running=1, queued=1)
    replicas = [
        ReplicaStatus(name="a-0", stage="a", state=stage_pb2.REPLICA_STATE_UNREACHABLE),
        ReplicaStatus(name="a-1", stage="a", state=stage_pb2.REPLICA_STATE_LOADING, detail="weights"),
        ReplicaStatus(name="b-0", stage="b", state=stage_pb2.REPLICA_STATE_READY),
        ReplicaStatus(name="b-1", stage="b", state=stage_pb2.REPLICA_STATE_DRAINING, planned=1, load=load),
        ReplicaStatus(name="d-0", stage="d", state=stage_pb2.REPLICA_STATE_DRAINING),
    ]
    assert unmet_cause(admin_pb2.WatchPipelineResponse(replicas=replicas), target, condition) == cause


def test_a_drain_that_moves_requests_does_not_wait_for_their_end(running: Deployment, long_request: str) -> None:
    (there,) = (replica for replica, has_ended in _writers(running, long_request).items() if not has_ended)
    assert _admin(running, "drain", there, "--move", "--wait", "--timeout", "20").exit_code == 0
    _admin(running, "resume", there)
    other = {"write-0": "write-1", "write-1": "write-0"}[there]
    assert _writers(running, long_request) == {there: True, other: False}
    assert "moved to another replica" in _admin(running, "request", long_request).stdout


def test_a_rolling_restart_under_load_fails_no_request(running: Deployment) -> None:
    before = {name: running.process_id(name) for name in ("write-0", "write-1", "speak-0", "speak-1")}
    stop = threading.Event()

    def load(number: int) -> int:
        done = 0
        with running.client() as client:
            while not stop.is_set():
                assert client.generate(f"hello {number}", timeout_s=30).result().text
                done += 1
        return done

    with ThreadPoolExecutor(3) as pool:
        loads = [pool.submit(load, number) for number in range(3)]
        try:
            restarts = [_json(running, "restart", stage) for stage in ("write", "speak")]
        finally:
            stop.set()
        assert min(each.result(60) for each in loads) > 0
    phases = [event["phase"].removeprefix("RESTART_PHASE_") for events in restarts for event in events]
    assert [phase for phase in phases if phase != "DRAINING"] == ["ENDING", "STARTING", "READY"] * 4
    running.wait(lambda deployment: all(not deployment.runs(name, pid) for name, pid in before.items()))


def test_top_shows_rates_and_counts_the_chunks_of_running_requests(running: Deployment, long_request: str) -> None:
    shown = invoke("top", "--once", "--interval", "0.3", "--server", running.admin_endpoint).output
    for words in ("rehearsal", "1 of 64 requests in flight", "outputs/s", "write->speak", long_request):
        assert words in shown

    def count() -> int:
        document = json.loads(invoke("top", "--once", "--json", "--server", running.admin_endpoint).stdout)
        assert [stage["name"] for stage in document["stages"]] == ["write", "speak", "sound"]
        assert document["pipeline"]["ready"] is True
        (edge,) = (each for each in document["edges"] if each["edge"]["name"] == "write->speak")
        return int(edge["sent"]["chunks"]) if edge["sent"] else 0

    before = count()
    eventually(lambda: count() > before, timeout_s=20)


def test_top_shows_the_rates_of_edges() -> None:
    def snapshot(clock_s: float, chunks: int) -> admin_pb2.WatchPipelineResponse:
        edge = orchestrator_pb2.EdgeDescription(name="a->b", from_stage="a", to_stage="b")
        sent = stage_pb2.SentChunks(edge="a->b", chunks=chunks, size_bytes=chunks << 20)
        return admin_pb2.WatchPipelineResponse(clock_s=clock_s, edges=[admin_pb2.EdgeStatus(edge=edge, sent=sent)])

    def shown(chunks: int) -> str:
        lines = _printed(top_view(snapshot(3.0, chunks), snapshot(1.0, 7))).splitlines()
        return " ".join(next(line for line in lines if "a->b" in line).split())

    assert "3.0 3.1 MB 13" in shown(13)
    # A restarted replica counts from 0.
    assert "0 0 bytes 2" in shown(2)


def test_a_timeline_shows_a_moved_step_and_its_successor() -> None:
    error = chunk_pb2.Error(reason="DRAINED", message="a-0 hands on what it runs")
    rebinding = admin_pb2.StepRebinding(at_s=1.2, edges=["a->b"])
    steps = [
        admin_pb2.StepStatus(stage="a", replica="a-0", attempt=1, ended_s=1.0, error=error),
        admin_pb2.StepStatus(stage="a", replica="a-1", attempt=2, accepted_s=1.5, resumed_engine_steps=7),
        admin_pb2.StepStatus(stage="b", replica="b-0", attempt=1, accepted_s=0.5, rebindings=[rebinding]),
    ]
    events = [moment.event for moment in moments(admin_pb2.GetRequestResponse(steps=steps))]
    assert events == [
        "received",
        "accepted the step",
        "released the step for another replica, because it is drained",
        "was connected to another replica on a->b",
        "accepted the step and resumes after engine step 7",
    ]


def test_brackets_in_an_error_message_are_printed_verbatim() -> None:
    error = chunk_pb2.Error(message="[/bold] is float32[samples]")
    status = admin_pb2.RequestStatus(request_id="r", state=admin_pb2.REQUEST_STATE_FAILED, error=error)
    step = admin_pb2.StepStatus(stage="a", replica="a-0", attempt=1, ended_s=1.0, error=error)
    request = request_view(admin_pb2.GetRequestResponse(request=status, steps=[step]))
    assert _printed(make_table(REQUESTS, [status]), request).count("[/bold] is float32[samples]") == 4


@pytest.mark.parametrize(
    ("attempt", "text"), [(1, "1"), (3, "3"), (1000, "1000"), (1001, "1 of call 2"), (5002, "2 of call 6")]
)
def test_an_attempt_names_the_clients_call(attempt: int, text: str) -> None:
    assert attempt_text(attempt) == text
