"""Records an answer that continues although `kill -9` ends the process that generates it, as docs/recovery.svg.

Starts the pipeline `speech` with two thinkers and sends a prompt twice, with the same seed. The second time, it kills
the thinker that generates the text. Fails unless both answers have the same bytes of text and of audio.

Run it in the repository's root, after `make models`: python -m tools.recordings.recovery
"""

import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tools.recordings.terminal_svg import COLUMNS, Piece, Terminal, draw

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "Tell me a short story about a lighthouse."
SEED = "2"
MAX_TOKENS = "77"
REQUEST = "story"
KILL_AT = 130
"""The number of characters of text after which the thinker is killed."""
_STAGEMESH = str(Path(sys.executable).with_name("stagemesh"))
_TYPED_S = 1.0
"""The time between the appearance of a command and its start."""


def main() -> None:
    """Records, and writes docs/recovery.svg."""
    with tempfile.TemporaryDirectory() as name, _deployed() as (endpoint, admin_endpoint, process_ids):
        folder = Path(name)
        whole = _record(_generate(endpoint, folder / "whole.wav"))
        second = _record(
            _generate(endpoint, folder / "killed.wav", "--request-id", REQUEST),
            kill=lambda: _kill(admin_endpoint, process_ids),
        )
        if _text(whole) != _text(second):
            sys.exit("the texts of both runs differ")
        if (folder / "whole.wav").read_bytes() != (folder / "killed.wav").read_bytes():
            sys.exit("the audio of both runs differs")
        command = [_STAGEMESH, "admin", "request", REQUEST, "--server", admin_endpoint]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    target = ROOT / "docs/recovery.svg"
    target.write_text(_picture(second, report))
    pause_s = _pause(second)
    print(f"wrote {target.relative_to(ROOT)}; the text paused for {pause_s:.2f} s")


@contextmanager
def _deployed() -> Generator[tuple[str, str, dict[str, int]]]:
    """Runs `stagemesh up`. Yields its endpoint, its endpoint for operators, and the process ids of the replicas."""
    command = [_STAGEMESH, "up", "speech", "--set", "stages.thinker.replicas=2", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            process_ids = dict[str, int]()
            for line in process.stdout:
                document = json.loads(line)
                if document["event"] == "process":
                    process_ids[document["name"]] = document["process_id"]
                elif document["event"] == "ready":
                    yield document["endpoint"], document["admin_endpoint"], process_ids
                    break
            else:
                sys.exit("`stagemesh up` ended before the pipeline was ready")
        finally:
            process.send_signal(signal.SIGTERM)
            process.stdout.read()


def _generate(endpoint: str, audio: Path, *arguments: str) -> list[str]:
    options = ["--seed", SEED, "--max-tokens", MAX_TOKENS, "--audio", str(audio), "--server", endpoint]
    return [_STAGEMESH, "generate", PROMPT, *options, *arguments]


class _Recording:
    """The output of a command, with times in seconds after its start, and the command that killed a thinker."""

    def __init__(self) -> None:
        self.text: list[Piece] = []
        self.summary = ""
        self.ended_s = 0.0
        self.killed_s = 0.0
        self.kill_command = ""


def _record(command: Sequence[str], kill: Callable[[], str] | None = None) -> _Recording:
    """Runs a command, and calls `kill` once it has printed KILL_AT characters."""
    recording, started_s = _Recording(), time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for data in _read(process.stdout):
            recording.text.append(Piece(time.monotonic() - started_s, data.decode()))
            if kill is not None and len(_text(recording)) >= KILL_AT:
                recording.kill_command, kill = kill(), None
                recording.killed_s = time.monotonic() - started_s
        recording.summary = process.stderr.read().decode()
    if process.returncode:
        sys.exit(recording.summary)
    recording.ended_s = time.monotonic() - started_s
    return recording


def _read(stream: IO[bytes]) -> Iterator[bytes]:
    """Yields what a process prints, as soon as it prints it, until the process closes the stream."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while selector.select() and (data := os.read(stream.fileno(), 1 << 16)):
            yield data


def _kill(admin_endpoint: str, process_ids: dict[str, int]) -> str:
    """Kills the thinker that runs the request. Returns the name of this replica and the command that kills it."""
    command = [_STAGEMESH, "admin", "request", REQUEST, "--json", "--server", admin_endpoint]
    document = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    (replica,) = {step["replica"] for step in document["steps"] if step["stage"] == "thinker"}
    os.kill(process_ids[replica], signal.SIGKILL)
    return f"kill -9 {process_ids[replica]}    # {replica}, which generates this text"


def _text(recording: _Recording) -> str:
    return "".join(piece.text for piece in recording.text)


def _pause(recording: _Recording) -> float:
    """Returns the longest time after the kill during which no text appeared."""
    times = [recording.killed_s, *(piece.at_s for piece in recording.text if piece.at_s > recording.killed_s)]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def _picture(recording: _Recording, report: str) -> str:
    start_s = 2 * _TYPED_S
    options = f"--seed {SEED} --max-tokens {MAX_TOKENS} --audio killed.wav"
    resumed_s = recording.killed_s
    answer = [
        Piece(0, "$ stagemesh up speech --set stages.thinker.replicas=2\n", "command"),
        Piece(0, f'$ stagemesh generate "{PROMPT}" {options}\n', "command"),
        *(
            Piece(start_s + piece.at_s, piece.text, "resumed" if piece.at_s > resumed_s else "")
            for piece in recording.text
        ),
        Piece(start_s + recording.ended_s, f"\n{_select(recording.summary)}", "quiet"),
    ]
    end_s = start_s + recording.ended_s + _TYPED_S
    shell = [
        Piece(start_s + recording.killed_s, f"$ {recording.kill_command}\n", "alarm"),
        Piece(end_s, f"$ stagemesh admin request {REQUEST}\n", "command"),
        Piece(end_s + _TYPED_S, _cut_table(report)),
        Piece(end_s + 2 * _TYPED_S, "$ cmp killed.wav not-killed.wav && echo the same bytes\n", "command"),
        Piece(end_s + 3 * _TYPED_S, "the same bytes\n", "resumed"),
    ]
    label = (
        "A terminal prints an answer while it is generated. A second terminal kills the process that generates it. The "
        "text continues from another replica, and the audio has the same bytes as without the kill."
    )
    return draw([Terminal("a client", answer), Terminal("another shell", shell)], label=label)


def _cut_table(report: str) -> str:
    """Returns the table of the steps in a report of `admin request`, with one line of at most COLUMNS for each step."""
    lines = report.partition("\n\n")[2].partition("\n\n")[0].splitlines()
    rows = [line.rstrip() for line in lines if not line.startswith(" ")]
    return "".join((row if len(row) <= COLUMNS else f"{row[: COLUMNS - 1]}…") + "\n" for row in rows)


def _select(summary: str) -> str:
    """Returns the lines of the summary about times."""
    return "".join(line.rstrip() + "\n" for line in summary.splitlines() if line.startswith(("time to first", "audio")))


if __name__ == "__main__":
    main()
