"""The pipeline as it is now, in the contract's terms."""

from stagemesh.connectors.registry import number_of
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.replica import Replica
from stagemesh.orchestrator.spec import Edge, PipelineOutput, Stage
from stagemesh.v1 import orchestrator_pb2


def describe_pipeline(orchestrator: Orchestrator) -> orchestrator_pb2.DescribePipelineResponse:
    """Stages, replicas, edges, outputs and load."""
    pipeline, replicas = orchestrator.pipeline, orchestrator.fleet.replicas
    return orchestrator_pb2.DescribePipelineResponse(
        pipeline=pipeline.name,
        generation=pipeline.generation,
        stages=[_stage(stage, replicas.get(stage.name, ())) for stage in pipeline.stages.values()],
        edges=[_edge(edge) for edge in pipeline.edges],
        outputs=[_output(output) for output in pipeline.outputs.values()],
        in_flight=orchestrator.admission.in_flight,
        max_in_flight=orchestrator.admission.max_in_flight,
    )


def _stage(stage: Stage, replicas: tuple[Replica, ...]) -> orchestrator_pb2.StageDescription:
    return orchestrator_pb2.StageDescription(
        name=stage.name, engine=stage.engine, model=stage.model_name, replicas=[_replica(each) for each in replicas]
    )


def _replica(replica: Replica) -> orchestrator_pb2.ReplicaDescription:
    return orchestrator_pb2.ReplicaDescription(
        name=replica.name,
        endpoint=replica.endpoint,
        state=replica.state.wire,
        detail=replica.detail,
        running=replica.running,
    )


def _edge(edge: Edge) -> orchestrator_pb2.EdgeDescription:
    return orchestrator_pb2.EdgeDescription(
        name=edge.name, from_stage=edge.producer, to_stage=edge.consumer, connector=number_of(edge.connector)
    )


def _output(output: PipelineOutput) -> orchestrator_pb2.OutputDescription:
    return orchestrator_pb2.OutputDescription(
        name=output.name, stage=output.stage, kind=output.kind, sample_rate_hz=output.sample_rate_hz
    )
