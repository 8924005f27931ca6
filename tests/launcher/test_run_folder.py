from pathlib import Path

from stagemesh.orchestrator.launcher.run_folder import KEPT_RUNS, RunFolder, read_tail


def _abandoned(runs_dir: Path, *, name: str) -> Path:
    path = runs_dir / name
    path.mkdir(parents=True)
    (path / "a.json").write_text("{}")
    (path / "a.log").write_text("log")
    return path


def test_logs_of_the_newest_runs_are_kept(tmp_path: Path) -> None:
    paths = [_abandoned(tmp_path, name=f"2020010{day}-000000-1") for day in range(1, 8)]
    RunFolder(tmp_path).close()
    assert [path.exists() for path in paths] == [False] * (7 - KEPT_RUNS) + [True] * KEPT_RUNS
    assert (paths[-1] / "a.log").exists()
    assert not (paths[-1] / "a.json").exists()


def test_a_run_in_progress_keeps_its_configs(tmp_path: Path) -> None:
    first = RunFolder(tmp_path)
    config = first.write_config("a", b"{}")
    RunFolder(tmp_path).close()
    assert config.exists()
    first.close()


def test_closing_removes_configs_and_keeps_logs(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    config = folder.write_config("a", b"{}")
    folder.log_path("a").write_text("log")
    folder.close()
    folder.close()
    assert (config.exists(), folder.log_path("a").exists()) == (False, True)


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(str(number) for number in range(10000)))
    assert read_tail(log, lines=2) == "9998\n9999"
    assert read_tail(tmp_path / "none") == ""
