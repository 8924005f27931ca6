"""The description of a pipeline, its stages, replicas, edges and outputs, as an orchestrator returns it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from stagemesh.common.connector_descriptors import name_of
from stagemesh.common.errors import InvalidRequestError
from stagemesh.v1 import chunk_pb2, orchestrator_pb2, stage_pb2


class ReplicaState(Enum):
    """The state of a replica. The value is the word shown to people."""

    UNKNOWN = "unknown"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    ASLEEP = "asleep"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True)
class ReplicaInfo:
    """A replica. `running` counts the steps that it runs for this orchestrator."""

    name: str
    endpoint: str
    state: ReplicaState
    detail: str
    running: int


@dataclass(frozen=True)
class StageInfo:
    """A stage and its replicas."""

    name: str
    engine: str
    model: str
    replicas: tuple[ReplicaInfo, ...]


@dataclass(frozen=True)
class LinkInfo:
    """An edge between two ready replicas.

    `connector` names the connector in use. It is empty until the producer has reported one. `error` says why there is
    none. `refusals` maps each better connector to the reason why it cannot be used.
    """

    producer: str
    consumer: str
    connector: str
    error: str
    refusals: Mapping[str, str]


@dataclass(frozen=True)
class EdgeInfo:
    """An edge, the connector that the pipeline file sets, and the links between its replicas."""

    name: str
    from_stage: str
    to_stage: str
    connector: str
    links: tuple[LinkInfo, ...] = ()


@dataclass(frozen=True)
class OutputInfo:
    """An output. `kind` is text, audio, image or tensor. `sample_rate_hz` is 0 unless the output is audio."""

    name: str
    stage: str
    kind: str
    sample_rate_hz: int


@dataclass(frozen=True)
class PipelineInfo:
    """The current state of a pipeline."""

    name: str
    generation: str
    stages: tuple[StageInfo, ...]
    edges: tuple[EdgeInfo, ...]
    outputs: tuple[OutputInfo, ...]
    in_flight: int
    max_in_flight: int
    queued: int
    max_queued: int


def decode_pipeline(message: orchestrator_pb2.DescribePipelineResponse) -> PipelineInfo:
    """Converts a pipeline description from the wire."""
    return PipelineInfo(
        name=message.pipeline,
        generation=message.generation,
        stages=tuple(_stage(stage) for stage in message.stages),
        edges=tuple(decode_edge(edge) for edge in message.edges),
        outputs=tuple(OutputInfo(out.name, out.stage, out.kind, out.sample_rate_hz) for out in message.outputs),
        in_flight=message.in_flight,
        max_in_flight=message.max_in_flight,
        queued=message.queued,
        max_queued=message.max_queued,
    )


def decode_edge(message: orchestrator_pb2.EdgeDescription) -> EdgeInfo:
    """Converts an edge description from the wire."""
    return EdgeInfo(
        message.name,
        message.from_stage,
        message.to_stage,
        _connector_word(message.connector),
        tuple(_link(link) for link in message.links),
    )


def decode_replica_state(value: stage_pb2.ReplicaState.ValueType) -> ReplicaState:
    """Converts a replica state from the wire. States that this client does not know become UNKNOWN."""
    known = dict(zip(stage_pb2.ReplicaState.values(), stage_pb2.ReplicaState.keys(), strict=True))
    word = known.get(value, "").removeprefix("REPLICA_STATE_").lower()
    return ReplicaState(word) if word in {state.value for state in ReplicaState} else ReplicaState.UNKNOWN


def _stage(message: orchestrator_pb2.StageDescription) -> StageInfo:
    replicas = tuple(
        ReplicaInfo(
            replica.name, replica.endpoint, decode_replica_state(replica.state), replica.detail, replica.running
        )
        for replica in message.replicas
    )
    return StageInfo(message.name, message.engine, message.model, replicas)


def _link(message: orchestrator_pb2.EdgeLink) -> LinkInfo:
    return LinkInfo(
        producer=message.producer,
        consumer=message.consumer,
        connector=_connector_word(message.connector) if message.connector else "",
        error=message.error.message,
        refusals={_connector_word(each.connector): each.error.message for each in message.refusals},
    )


def _connector_word(value: chunk_pb2.Connector.ValueType) -> str:
    try:
        return name_of(value)
    except InvalidRequestError:
        # A connector of a newer server, or of a plug-in that is not installed here.
        return "unknown"
