from pathlib import Path

import pytest

from tools.prose_lint import check_file

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
_BAD, _GOOD = zip(*PAIRS, strict=True)


def _findings(folder: Path, source: str, *, name: str = "module.py") -> int:
    (folder / name).write_text(source)
    return len(check_file(folder / name))


@pytest.mark.parametrize("sentence", _BAD)
def test_a_bad_docstring_is_found(tmp_path: Path, sentence: str) -> None:
    assert _findings(tmp_path, f'"""{sentence}"""\n') == 1


@pytest.mark.parametrize("sentence", _GOOD)
def test_a_good_docstring_passes(tmp_path: Path, sentence: str) -> None:
    assert _findings(tmp_path, f'"""{sentence}"""\n') == 0


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
