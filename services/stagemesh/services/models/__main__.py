"""Fetches the models of a pipeline: `python -m stagemesh.services.models fetch PIPELINE [--force]`.

The exit code is 0 if all models are present when the command ends.
"""

import argparse
import signal
import sys
from collections.abc import Sequence

from stagemesh.common.errors import ExitCode, StagemeshError, exit_code, exit_without_extra
from stagemesh.common.process.settings import models_dir

with exit_without_extra("cli,speech", of="fetching models"):
    from rich.console import Console

    from stagemesh.services.models.downloads import FetchProgress, fetch
    from stagemesh.services.models.store import PIPELINES, ModelStore, recipes_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command `fetch`. Returns the exit status: 0 if all models are present."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    try:
        with FetchProgress(console) as progress:
            fetch(recipes_of(options.pipeline), store=ModelStore(models_dir()), progress=progress, force=options.force)
    except (StagemeshError, OSError) as exc:
        cause = exc.message if isinstance(exc, StagemeshError) else f"{models_dir()}: {exc}"
        console.print(f"error: {cause}", soft_wrap=True, highlight=False, markup=False)
        return exit_code(exc) if isinstance(exc, StagemeshError) else ExitCode.FAILED
    except KeyboardInterrupt:
        console.print("interrupted; incomplete models were deleted", highlight=False)
        return ExitCode.INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stagemesh.services.models", description="Fetch the models of a pipeline."
    )
    parser.add_argument("command", choices=["fetch"], help="Fetch the models that a pipeline needs.")
    parser.add_argument("pipeline", help=f"The pipeline; one of: {', '.join(PIPELINES)}.")
    parser.add_argument(
        "--force", action="store_true", help="Fetch and convert all models again; by default, present models are kept."
    )
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
