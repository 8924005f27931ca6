"""Runs one orchestrator process: `python -m stagemesh.orchestrator --config FILE`."""

import sys

from stagemesh.common.errors import exit_without_extra

with exit_without_extra("orchestrator", of="an orchestrator"):
    from stagemesh.common.process.lifecycle import run_configured
    from stagemesh.orchestrator.config import OrchestratorConfig
    from stagemesh.orchestrator.service import serve

if __name__ == "__main__":
    sys.exit(run_configured(OrchestratorConfig, serve, module="stagemesh.orchestrator"))
