"""Describes the pipeline and its current state in messages of the public API."""

from collections.abc import Sequence

from stagemesh.common.plugins.connectors import GRPC, number_of
from stagemesh.common.plugins.descriptors import kind_to_wire, signature_to_wire
from stagemesh.common.wire.encoding import to_message
from stagemesh.common.wire.versions import own_protocol
from stagemesh.connectors.stream.connector_agreement import probe_to_wire
from stagemesh.orchestrator.config import OrchestratorConfig
from stagemesh.orchestrator.fleet.edge_connectors import EdgeLink
from stagemesh.orchestrator.fleet.replica import Replica, reported_load
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.pipeline import Edge, Stage
from stagemesh.rpc.channels import MAX_FIELDS, MAX_MESSAGE_BYTES
from stagemesh.rpc.error_mapping import error_to_wire
from stagemesh.v1 import orchestrator_pb2, stage_pb2

# An idle replica reports its load every 30 seconds.
_OVERDUE_S = 60.0


def describe_pipeline(
    orchestrator: Orchestrator, config: OrchestratorConfig, *, caller: str
) -> orchestrator_pb2.DescribePipelineResponse:
    """Returns a description of the pipeline: its stages, replicas, edges and outputs, and its current load.

    `config` has the addresses of the pipeline's other services for clients. `caller` is the name of the caller.
    """
    pipeline, replicas = orchestrator.pipeline, orchestrator.fleet.replicas
    return to_message(
        orchestrator_pb2.DescribePipelineResponse,
        config,
        pipeline=pipeline.name,
        generation=pipeline.generation,
        stages=[_stage(stage, replicas.get(stage.name, ())) for stage in pipeline.stages.values()],
        edges=[
            *(describe_edge(edge, orchestrator.fleet.edge_connectors.links_of(edge)) for edge in pipeline.edges),
            *(describe_edge(edge) for edge in pipeline.input_edges),
        ],
        outputs=[
            to_message(
                orchestrator_pb2.OutputDescription, output, kind=kind_to_wire(output.kind), media_type=output.file_type
            )
            for output in pipeline.outputs.values()
        ],
        in_flight=orchestrator.admission.loads.running.choices,
        max_in_flight=pipeline.limits.max_in_flight,
        queued=orchestrator.admission.loads.waiting.requests,
        max_queued=pipeline.limits.max_queued,
        protocol=own_protocol(),
        limits=orchestrator_pb2.PipelineLimits(
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_file_bytes=0 if pipeline.media is None else pipeline.media.max_file_bytes,
            max_choices=pipeline.limits.largest_request,
            max_request_s=orchestrator.max_request_s,
            max_fields=MAX_FIELDS,
        ),
        detects_turns=pipeline.speech is not None,
        caller=caller,
    )


def _stage(stage: Stage, replicas: tuple[Replica, ...]) -> orchestrator_pb2.StageDescription:
    return orchestrator_pb2.StageDescription(
        name=stage.name,
        engine=stage.engine,
        model=stage.model_name,
        replicas=map(replica_status, replicas),
        signature=signature_to_wire(stage.signature),
    )


def replica_status(replica: Replica) -> orchestrator_pb2.ReplicaStatus:
    """Returns the status of a replica.

    Includes the newest load report if the replica is loading, ready, draining or asleep.
    """
    load = reported_load(replica)
    overdue = load is not None and replica.report_age_s > _OVERDUE_S
    return to_message(
        orchestrator_pb2.ReplicaStatus,
        replica,
        state=replica.state.value,
        detail=replica.detail or (f"last load report {replica.report_age_s:.0f} s ago" if overdue else ""),
        planned=replica.running,
        load=load,
    )


def describe_edge(edge: Edge, links: Sequence[EdgeLink] = ()) -> orchestrator_pb2.EdgeDescription:
    """Returns a description of an edge and its links. Each link has its connector, or the error of its last probe."""
    return orchestrator_pb2.EdgeDescription(
        name=edge.name,
        from_stage=edge.producer,
        to_stage=edge.consumer,
        connector=number_of(GRPC if edge.is_input else edge.connector),
        links=[_link(link) for link in links],
    )


def _link(link: EdgeLink) -> orchestrator_pb2.EdgeLink:
    probe = stage_pb2.ProbeEdgeResponse() if link.probe is None else probe_to_wire(link.probe)
    error = None if link.error is None else error_to_wire(link.error)
    return to_message(
        orchestrator_pb2.EdgeLink, probe, producer=link.producer.name, consumer=link.consumer.name, error=error
    )
