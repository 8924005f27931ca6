import json
from pathlib import Path
from typing import Any

import pytest

from stagemesh.client import read_wav
from stagemesh.common.errors import ExitCode
from tests.cli.commands import Ran, stagemesh
from tests.deployment import Deployment

pytestmark = pytest.mark.timeout(180)


async def job(jobs_up: Deployment, command: str, *arguments: str) -> Ran:
    return await stagemesh("job", command, *arguments, "--server", jobs_up.endpoint)


async def document(jobs_up: Deployment, command: str, *arguments: str) -> Any:
    return json.loads((await job(jobs_up, command, *arguments, "--json")).output)


async def test_a_job_is_submitted_watched_and_downloaded(jobs_up: Deployment, tmp_path: Path) -> None:
    submitted = await job(jobs_up, "submit", "hello", "--id", "first", "--label", "series=sea", "--seed", "3")
    assert submitted.stdout == "first\n"
    watched = await document(jobs_up, "watch", "first")
    assert (watched["state"], watched["fraction"], watched["seed"]) == ("succeeded", 1.0, 3)
    assert watched["labels"] == {"series": "sea"}
    assert {output["name"] for output in watched["outputs"]} == {"text", "song"}
    downloaded = await document(jobs_up, "download", "first", "--output", str(tmp_path / "results"))
    (path,) = downloaded["files"]
    assert len(read_wav(path).samples)
    shown = await job(jobs_up, "get", "first")
    assert "succeeded" in shown.stdout
    assert "song: file://" in shown.stdout


async def test_jobs_are_listed_by_state(jobs_up: Deployment) -> None:
    await job(jobs_up, "submit", "hello", "--id", "listed")
    await document(jobs_up, "watch", "listed")
    assert "listed" in (await job(jobs_up, "list", "--state", "succeeded")).stdout
    assert "listed" not in (await job(jobs_up, "list", "--state", "failed")).stdout
    wrong = await job(jobs_up, "list", "--state", "done")
    wrong.check(ExitCode.USAGE, "queued, running, succeeded, failed, cancelled")


async def test_a_cancelled_job_has_no_files_and_can_be_deleted(jobs_up: Deployment) -> None:
    await job(jobs_up, "submit", "hello", "--max-tokens", "3000", "--id", "long")
    assert (await document(jobs_up, "cancel", "long"))["cancel_requested"]
    assert (await job(jobs_up, "watch", "long")).exit_code == ExitCode.FAILED
    (await job(jobs_up, "download", "long")).check(ExitCode.REFUSED, "has no files")
    assert await document(jobs_up, "delete", "long") == {"job_id": "long", "deleted": True}
    assert (await job(jobs_up, "get", "long")).exit_code == ExitCode.NOT_FOUND


async def test_the_error_of_a_job_ends_the_command(jobs_up: Deployment) -> None:
    await job(jobs_up, "submit", "hello", "--id", "wrong", "--outputs", "nothing")
    (await job(jobs_up, "watch", "wrong")).check(ExitCode.USAGE, "nothing")
