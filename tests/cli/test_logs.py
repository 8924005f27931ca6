import json
from pathlib import Path

import pytest

from stagemesh.cli.launcher.run_folder import RunFolder
from stagemesh.common.errors import ExitCode
from tests.cli.commands import Ran, invoke, start


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("STAGEMESH_HOME", str(tmp_path))
    folder = RunFolder(tmp_path / "runs", pipeline="talks")
    _add(folder, "voice-0", "2026-01-01 00:00:01,000 INFO loads", "Traceback", "2026-01-01 00:00:03,000 INFO ready")
    _add(folder, "voice-1", "2026-01-01 00:00:02,000 INFO ready")
    _add(folder, "orchestrator", "2026-01-01 00:00:04,000 INFO serves")
    return folder


def _add(folder: RunFolder, process: str, *lines: str) -> None:
    with folder.log_path(process).open("a") as log:
        log.writelines(f"{line}\n" for line in lines)


def _lines(ran: Ran) -> list[str]:
    return [line.replace("2026-01-01 00:00:", "") for line in ran.output.splitlines()]


def test_logs_are_merged_by_time(run: RunFolder) -> None:
    ran = invoke("logs")
    assert _lines(ran) == [
        "voice-0: 01,000 INFO loads",
        "voice-0: Traceback",
        "voice-1: 02,000 INFO ready",
        "voice-0: 03,000 INFO ready",
        "orchestrator: 04,000 INFO serves",
    ]
    assert str(run.path) in ran.stderr


@pytest.mark.parametrize(
    ("name", "processes"), [("voice", {"voice-0", "voice-1"}), ("voice-1", {"voice-1"}), ("orchestrator", None)]
)
def test_logs_of_a_stage_or_a_process(run: RunFolder, name: str, processes: set[str] | None) -> None:
    assert {line.partition(":")[0] for line in _lines(invoke("logs", name))} == (processes or {name})


def test_the_last_lines_as_json(run: RunFolder) -> None:
    (line,) = _lines(invoke("logs", "-n", "1", "--json"))
    assert json.loads(line) == {"process": "orchestrator", "text": "04,000 INFO serves"}


def test_an_unknown_stage_and_an_unknown_run(run: RunFolder) -> None:
    ran = invoke("logs", "talker")
    ran.check(ExitCode.NOT_FOUND, "no log of 'talker'; it has orchestrator, voice-0, voice-1")
    assert invoke("logs", "--run", "1999").exit_code == ExitCode.NOT_FOUND


def test_runs_are_listed(run: RunFolder) -> None:
    (listed,) = json.loads(invoke("logs", "--list", "--json").stdout)
    assert (listed["run"], listed["pipeline"], listed["state"]) == (run.path.name, "talks", "running")
    run.close()
    assert "ended" in invoke("logs", "--list").stdout


def test_an_incomplete_line_is_shown_when_the_run_is_over(run: RunFolder) -> None:
    with run.log_path("orchestrator").open("a") as log:
        log.write("Segmentation fault")
    assert "Segmentation fault" not in invoke("logs").stdout
    run.close()
    assert _lines(invoke("logs"))[-1] == "orchestrator: Segmentation fault"


async def test_logs_are_followed_to_the_end_of_the_run(run: RunFolder) -> None:
    process = await start("logs", "voice", "-f", "-n", "1")
    assert process.stdout is not None
    assert b"03,000 INFO ready" in await process.stdout.readline()
    _add(run, "voice-2", "2026-01-01 00:00:05,000 INFO starts")
    assert b"voice-2: 2026-01-01 00:00:05,000 INFO starts" in await process.stdout.readline()
    run.close()
    assert (await process.stdout.read(), await process.wait()) == (b"", 0)
