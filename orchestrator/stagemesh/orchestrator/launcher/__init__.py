"""Runs a pipeline on one machine as supervised child processes."""

from stagemesh.common.backoff import RestartPolicy
from stagemesh.orchestrator.launcher.launcher import Launcher
from stagemesh.orchestrator.launcher.process_states import ORCHESTRATOR, ProcessState, ProcessStatus

__all__ = ["ORCHESTRATOR", "Launcher", "ProcessState", "ProcessStatus", "RestartPolicy"]
