from pathlib import Path

import pytest

from tests.repository.commands import git
from tools.prose_lint import changed_lines, check_file, default_base

PAIRS = [
    ("Starts the stage anew.", "Restarts the stage."),
    ("Beside the prompt, it takes tensors.", "In addition to the prompt, it accepts tensors."),
    ("Waits so long.", "Waits for at most 5 seconds."),
    ("It is no stage.", "It is not a stage. There is no stage. It is no longer ready."),
    ("Copies them, for the reader may end.", "Copies them, for a reader that may end. Copies them, for the reader."),
    ("Stops when nobody reads.", "Stops when no caller reads."),
    ("Lets go of the lease.", "Releases the lease."),
    ("The owner is told.", "The owner is notified."),
    ("The step goes on.", "The step continues on another replica."),
    ("Asks its neighbours.", "Asks its upstream stages."),
    ("Draws a picture.", "Draws an image."),
    ("Takes the seat.", "Takes the slot."),
    ("What a stage emits.", "Returns what a stage emits."),
    ("See `Engine`.", "Runs the engine. See `Engine` for its states."),
]
NEWER_PAIRS = [
    ("Waits for the begin of a step.", "Waits for the start of a step. They begin together."),
    ("The stage ends, so that memory is free.", "The stage ends so that memory is free."),
    ("Returns those of the stage.", "Returns the edges of the stage. Each of those is open."),
    ("Has a folder of its own.", "Has its own folder."),
    ("Calls the stage by TLS.", "Calls the stage over TLS. Found by name."),
    ("Reads the tokens of the user.", "Reads the user's tokens."),
    ("It ends. Who waits is notified.", "It ends. Who waits for it? Callers who wait are notified."),
    ("It shall end.", "It must end."),
    ("Each medium is a file.", "Each media item is a file."),
    ("Prints the figures.", "Prints the metrics."),
    ("Asks the admin.", "Asks the operator. Opens the admin port. Calls the admin API."),
    ("Ends with exit code 1.", "Ends with exit status 1."),
]
_COMMAND = 'def f(a: Annotated[int, typer.Option(help="Uses {0} if omitted.")] = {0}) -> None: ...\n'


def _findings(folder: Path, source: str, *, name: str = "module.py", changed: bool = False) -> int:
    (folder / name).write_text(source)
    return len(check_file(folder / name, changed=range(1, 9) if changed else ()))


@pytest.mark.parametrize(("bad", "good"), [*PAIRS, *NEWER_PAIRS])
def test_a_bad_docstring_is_found_and_a_good_one_passes(tmp_path: Path, bad: str, good: str) -> None:
    # A newer rule applies to changed lines alone.
    assert _findings(tmp_path, f'"""{bad}"""\n') == ((bad, good) in PAIRS)
    assert _findings(tmp_path, f'"""{bad}"""\n', changed=True) == 1
    assert _findings(tmp_path, f'"""{good}"""\n', changed=True) == 0


@pytest.mark.parametrize(("default", "count"), [("5", 1), ("None", 0)])
def test_a_help_text_does_not_repeat_the_default_that_typer_shows(tmp_path: Path, default: str, count: int) -> None:
    assert _findings(tmp_path, _COMMAND.format(default), changed=True) == count


def test_changed_lines_are_those_since_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_base() == ""
    git(tmp_path, "init", "--quiet")
    for content in ("1\n2\n3\n", "1\ntwo\n3\n"):
        (tmp_path / "ä b.md").write_text(content)
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "--quiet", "--message", "a commit")
    (tmp_path / "new.md").write_text("1\n")
    assert changed_lines(default_base()) == {"ä b.md": {2}, "new.md": {1, 2}}


@pytest.mark.parametrize(
    "source",
    [
        "# It starts anew.\n",
        'raise ValueError(f"{1} is no number")\n',
        'log.info("replica %s starts anew", 1)\n',
        'Option(help="Start anew.")\n',
        "class Roster: ...\n",
        "def f(nobody: int) -> None: ...\n",
    ],
)
def test_comments_messages_helps_and_names_are_checked(tmp_path: Path, source: str) -> None:
    assert _findings(tmp_path, source) == 1


def test_a_finding_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text('"""A module.\n\nIt starts anew.\n"""\n')
    (finding,) = check_file(tmp_path / "module.py")
    assert (finding.line, finding.phrase) == (3, "anew")


def test_documents_are_checked_outside_of_code(tmp_path: Path) -> None:
    assert _findings(tmp_path, "It starts anew.\n\n```\nanew\n```\n\n    anew\n", name="a.md") == 1
    assert _findings(tmp_path, "// It starts anew.\nmessage anew {}\n", name="a.proto") == 1
