"""Runs one replica of one stage: `python -m stagemesh.services.stage --config FILE`."""

import sys

from stagemesh.common.extras import exit_without_extra

with exit_without_extra("stage", of="a stage"):
    from stagemesh.common.process_config import run_configured
    from stagemesh.common.stage_config import StageConfig
    from stagemesh.services.stage.process import serve

if __name__ == "__main__":
    sys.exit(run_configured(StageConfig, serve, module="stagemesh.services.stage"))
