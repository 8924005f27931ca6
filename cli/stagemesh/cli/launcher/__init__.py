"""Launches a pipeline on one machine as supervised child processes."""

from stagemesh.cli.launcher.launcher import Launcher
from stagemesh.cli.launcher.probes import ORCHESTRATOR, ProcessState, ProcessStatus

__all__ = ["ORCHESTRATOR", "Launcher", "ProcessState", "ProcessStatus"]
