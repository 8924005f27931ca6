import os
import time
from pathlib import Path

import pytest

from stagemesh.cli.launcher import run_folder
from stagemesh.cli.launcher.run_folder import KEPT_S, RunFolder, find_run, past_runs, read_tail
from stagemesh.common.errors import InvalidRequestError, NotFoundError
from tests.limits import files_of_at_most


def _abandoned(runs_dir: Path, *, name: str, age_s: float = 0) -> Path:
    path = runs_dir / name
    path.mkdir(parents=True)
    (path / ".lock").touch()
    (path / "a.json").write_text("{}")
    (path / "a.log").write_text("log")
    then_s = time.time() - age_s
    os.utime(path, (then_s, then_s))
    return path


def _run(runs_dir: Path) -> RunFolder:
    return RunFolder(runs_dir, pipeline="tested")


def test_logs_of_runs_are_kept_for_a_week(tmp_path: Path) -> None:
    old = _abandoned(tmp_path, name="20200101-000000-1-1-p", age_s=KEPT_S + 60)
    recent = _abandoned(tmp_path, name="20200102-000000-1-1-p", age_s=KEPT_S - 60)
    _run(tmp_path).close()
    assert (old.exists(), (recent / "a.log").exists(), (recent / "a.json").exists()) == (False, True, False)


@pytest.mark.parametrize(("limit", "value"), [("KEPT_BYTES", 2 * len("log")), ("KEPT_RUNS", 2)])
def test_kept_logs_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    monkeypatch.setattr(run_folder, limit, value)
    paths = [_abandoned(tmp_path, name=f"2020010{day}-000000-1-1-p") for day in range(1, 5)]
    _run(tmp_path).close()
    assert [path.exists() for path in paths] == [False, False, True, True]


def test_a_run_in_progress_keeps_its_configs(tmp_path: Path) -> None:
    first = _run(tmp_path)
    config = first.write_config("a", b"{}")
    _run(tmp_path).close()
    assert config.exists()
    first.close()


def test_closing_removes_configs_and_keeps_logs(tmp_path: Path) -> None:
    folder = _run(tmp_path)
    config = folder.write_config("a", b"{}")
    folder.log_path("a").write_text("log")
    folder.close()
    folder.close()
    assert (config.exists(), folder.log_path("a").exists()) == (False, True)


def test_a_run_is_found_by_the_begin_of_its_name(tmp_path: Path) -> None:
    for day in (1, 2):
        _abandoned(tmp_path, name=f"2020010{day}-000000-1-1-my-pipeline")
    assert find_run(tmp_path, None).name.startswith("20200102")
    assert find_run(tmp_path, "20200101").pipeline == "my-pipeline"
    with pytest.raises(NotFoundError, match="2 runs have a name that begins with '2020'"):
        find_run(tmp_path, "2020")
    with pytest.raises(NotFoundError, match="no run has a name that begins with '2021'"):
        find_run(tmp_path, "2021")
    with pytest.raises(NotFoundError, match="`stagemesh up` creates one"):
        find_run(tmp_path / "none", None)


def test_a_run_knows_whether_it_is_over(tmp_path: Path) -> None:
    folder = _run(tmp_path)
    (run,) = past_runs(tmp_path)
    assert (run.pipeline, run.is_over) == ("tested", False)
    folder.close()
    assert run.is_over


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequestError, match=r"cannot be written to .*file.*set STAGEMESH_HOME"):
        _run(tmp_path / "file")


def test_a_config_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with files_of_at_most(1):
        folder = _run(tmp_path)
        with pytest.raises(InvalidRequestError, match="File too large"):
            folder.write_config("a", b"{}")
    folder.close()


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(str(number) for number in range(10000)))
    assert read_tail(log, lines=2) == "9998\n9999"
    assert read_tail(tmp_path / "none") == ""
