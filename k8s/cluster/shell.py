"""Runs programs to their end, and waits for conditions with a deadline."""

import subprocess
import time
from collections.abc import Callable


def run(*command: str, stdin: str | None = None) -> str:
    """Runs a program to its end and returns its standard output without surrounding space.

    Raises subprocess.CalledProcessError, with the program's own message as a note, if the program fails.
    """
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        error = subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        error.add_note(done.stderr.strip() or done.stdout.strip())
        raise error
    return done.stdout.strip()


def wait_until(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    """Waits until `condition` returns True. A condition that raises is not met yet.

    Raises TimeoutError, which names `what`, after `limit_s` seconds.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            if condition():
                return
            last = "the condition is false"
        except (OSError, ValueError, IndexError, subprocess.CalledProcessError) as exc:
            last = " ".join([str(exc), *getattr(exc, "__notes__", [])])
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {limit_s:g} s for {what}; last: {last}")
        time.sleep(0.1)
