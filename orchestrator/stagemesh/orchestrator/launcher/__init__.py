"""Launches a pipeline on one machine as supervised child processes."""

from stagemesh.orchestrator.launcher.launcher import Launcher
from stagemesh.orchestrator.launcher.probes import ORCHESTRATOR, ProcessState, ProcessStatus
from stagemesh.orchestrator.launcher.supervisor import RestartPolicy

__all__ = ["ORCHESTRATOR", "Launcher", "ProcessState", "ProcessStatus", "RestartPolicy"]
