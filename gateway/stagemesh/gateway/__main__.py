"""Runs a gateway: `python -m stagemesh.gateway --config FILE`."""

import gc
import sys

from stagemesh.common.errors import exit_without_extra

with exit_without_extra("gateway", of="a gateway"):
    from stagemesh.common.process.lifecycle import run_configured
    from stagemesh.gateway.config import GatewayConfig
    from stagemesh.gateway.service import serve

if __name__ == "__main__":
    # A full collection of all that has been imported would stop the event loop for about 50 ms.
    gc.freeze()
    sys.exit(run_configured(GatewayConfig, serve, module="stagemesh.gateway"))
