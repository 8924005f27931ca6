"""Launches a pipeline on one machine as supervised child processes."""

from stagemesh.cli.launcher.launcher import Launcher
from stagemesh.cli.launcher.probes import ORCHESTRATOR, ProcessState, ProcessStatus
from stagemesh.cli.launcher.supervisor import RestartPolicy

__all__ = ["ORCHESTRATOR", "Launcher", "ProcessState", "ProcessStatus", "RestartPolicy"]
