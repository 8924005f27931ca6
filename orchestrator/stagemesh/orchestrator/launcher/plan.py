"""Determines the processes of a pipeline on this machine, and writes their config files."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from stagemesh.common.process_config import dump_config
from stagemesh.common.stage_config import StageConfig
from stagemesh.orchestrator.config import OrchestratorConfig, ReplicaAddress
from stagemesh.orchestrator.launcher.ports import HOST, PortPicker
from stagemesh.orchestrator.launcher.probes import probe_health, probe_stage
from stagemesh.orchestrator.launcher.process_states import ORCHESTRATOR
from stagemesh.orchestrator.launcher.run_folder import RunFolder
from stagemesh.orchestrator.launcher.supervisor import ProcessSpec
from stagemesh.orchestrator.spec import Pipeline, Stage


def plan_processes(
    pipeline: Pipeline,
    *,
    folder: RunFolder,
    listen: str,
    admin_listen: str,
    overrides: Mapping[str, str],
    ports: PortPicker,
) -> tuple[ProcessSpec, ...]:
    """Returns the specs of all processes of the pipeline: the orchestrator and all replicas.

    Selects ports for the replicas, and writes the config files of all processes to `folder`.
    """
    addresses = {stage.name: _addresses(stage, ports) for stage in pipeline.stages.values()}
    replicas = [
        _plan_replica(pipeline, stage, address=address, folder=folder)
        for stage in pipeline.stages.values()
        for address in addresses[stage.name]
    ]
    config = OrchestratorConfig(
        pipeline=str(pipeline.source),
        overrides=overrides,
        replicas=addresses,
        listen=listen,
        admin_listen=admin_listen,
        parent_pid=os.getpid(),
    )
    path = folder.write_config(ORCHESTRATOR, dump_config(config))
    orchestrator = ProcessSpec(
        name=ORCHESTRATOR,
        stage="",
        endpoint=listen,
        command=_command("stagemesh.orchestrator", path),
        log=folder.log_path(ORCHESTRATOR),
        probe=probe_health,
    )
    return (orchestrator, *replicas)


def _addresses(stage: Stage, ports: PortPicker) -> tuple[ReplicaAddress, ...]:
    return tuple(ReplicaAddress(f"{stage.name}-{i}", f"{HOST}:{ports.pick()}") for i in range(stage.replicas))


def _plan_replica(pipeline: Pipeline, stage: Stage, *, address: ReplicaAddress, folder: RunFolder) -> ProcessSpec:
    config = StageConfig(
        pipeline=pipeline.name,
        generation=pipeline.generation,
        stage=stage.name,
        replica=address.name,
        engine=stage.engine,
        function=stage.function,
        model=None if stage.model_path is None else str(stage.model_path),
        options=stage.options,
        listen=address.endpoint,
        data_plane=stage.data_plane,
        stall_s=stage.stall_s,
        parent_pid=os.getpid(),
    )
    path = folder.write_config(address.name, dump_config(config))
    return ProcessSpec(
        name=address.name,
        stage=stage.name,
        endpoint=address.endpoint,
        command=_command("stagemesh.services.stage", path),
        log=folder.log_path(address.name),
        probe=probe_stage,
    )


def _command(module: str, config: Path) -> tuple[str, ...]:
    # -u disables buffering, so that the log of a killed process is complete.
    return (sys.executable, "-u", "-m", module, "--config", str(config))
