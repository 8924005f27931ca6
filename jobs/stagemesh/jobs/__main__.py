"""Runs a job server: `python -m stagemesh.jobs --config FILE`."""

import sys

from stagemesh.common.errors import exit_without_extra

with exit_without_extra("jobs", of="a job server"):
    from stagemesh.common.process.lifecycle import run_configured
    from stagemesh.jobs.config import JobServerConfig
    from stagemesh.jobs.service import serve

if __name__ == "__main__":
    sys.exit(run_configured(JobServerConfig, serve, module="stagemesh.jobs"))
