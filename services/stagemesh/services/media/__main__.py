"""Runs a media service: `python -m stagemesh.services.media --config FILE`."""

import sys

from stagemesh.common.extras import exit_without_extra

with exit_without_extra("stage", of="a media service"):
    from stagemesh.common.media_config import MediaServiceConfig
    from stagemesh.common.process_config import run_configured
    from stagemesh.services.media.service import serve

if __name__ == "__main__":
    sys.exit(run_configured(MediaServiceConfig, serve, module="stagemesh.services.media"))
