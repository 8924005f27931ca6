"""Runs a media service: `python -m stagemesh.services.media --config FILE`."""

import sys

from stagemesh.common.errors import exit_without_extra

with exit_without_extra("stage", of="a media service"):
    from stagemesh.common.process.lifecycle import run_configured
    from stagemesh.common.process.media_config import MediaServiceConfig
    from stagemesh.services.media.service import serve

if __name__ == "__main__":
    sys.exit(run_configured(MediaServiceConfig, serve, module="stagemesh.services.media"))
