"""Lists the child processes of a process, which may start and end meanwhile."""

from contextlib import suppress

import psutil


def commands_of_children(process: psutil.Process) -> dict[psutil.Process, str]:
    """Returns the running children with their command lines. Skips zombies."""
    found = dict[psutil.Process, str]()
    for child in process.children():
        with suppress(psutil.NoSuchProcess):
            # psutil raises NoSuchProcess for a zombie too, because it has no command line.
            found[child] = " ".join(child.cmdline())
    return found
