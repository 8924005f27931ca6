"""The processes that a process has, looked at while they come and go."""

from contextlib import suppress

import psutil


def commands_of_children(process: psutil.Process) -> dict[psutil.Process, str]:
    """The children that live, with their command lines; one that has ended and is not waited for yet is none."""
    found = dict[psutil.Process, str]()
    for child in process.children():
        with suppress(psutil.NoSuchProcess):
            # A zombie is a NoSuchProcess here: it has no command line.
            found[child] = " ".join(child.cmdline())
    return found
