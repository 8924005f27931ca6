"""The command line: one module for each group of commands.

Commands import heavy modules inside their functions, so that the command line starts quickly.
"""

from stagemesh.common.extras import exit_without_extra


def main() -> None:
    """Runs the command line. This function is the entry point of the `stagemesh` program."""
    with exit_without_extra("cli", of="the command line"):
        from stagemesh.orchestrator.cli.main import app
    app()
