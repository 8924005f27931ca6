"""The entry point of the `stagemesh` command.

Commands import heavy modules inside their functions, so that the command line starts quickly.
"""

import os
import signal

from stagemesh.common.errors import exit_without_extra
from stagemesh.common.process.settings import set_library_variables

_INIT_PROCESS = 1


def main() -> None:
    """Runs the command line. This function is the entry point of the `stagemesh` program."""
    if os.getpid() == _INIT_PROCESS:
        # In a container, the kernel drops a SIGTERM for which the first process has no handler yet. A blocked signal
        # waits until `run_service` or `stop_on_signals` has installed the handlers, also while `serve` replaces the
        # process.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # gRPC would log when a peer stops. What goes wrong is raised and reported.
    set_library_variables({"GRPC_VERBOSITY": "NONE"})
    with exit_without_extra("cli", of="the command line"):
        from stagemesh.cli.app import app
    app()


if __name__ == "__main__":
    main()
