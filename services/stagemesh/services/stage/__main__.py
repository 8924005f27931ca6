"""Runs one replica of one stage: `python -m stagemesh.services.stage --config FILE`."""

import gc
import sys

from stagemesh.common.errors import exit_without_extra

# An engine's modules consist of a million objects. To search all of them for garbage again and again would take a fifth
# of the time in which they are imported. Processes that an engine spawns import this module first, too.
gc.set_threshold(700, 1000, 1000)

with exit_without_extra("stage", of="a stage"):
    from stagemesh.common.process.lifecycle import run_configured
    from stagemesh.common.process.stage_process import StageConfig
    from stagemesh.services.stage.process import serve

if __name__ == "__main__":
    sys.exit(run_configured(StageConfig, serve, module="stagemesh.services.stage"))
