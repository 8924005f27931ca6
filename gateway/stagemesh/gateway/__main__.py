"""Runs a gateway: `python -m stagemesh.gateway --config FILE`."""

import sys

from stagemesh.common.extras import exit_without_extra

with exit_without_extra("gateway", of="a gateway"):
    from stagemesh.common.gateway_config import GatewayConfig
    from stagemesh.common.process_config import run_configured
    from stagemesh.gateway.service import serve

if __name__ == "__main__":
    sys.exit(run_configured(GatewayConfig, serve, module="stagemesh.gateway"))
