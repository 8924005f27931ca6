"""`/v1/models` and `/v1/stagemesh/pipelines`: the pipelines, and the current state of their stages and edges."""

from typing import Any

from fastapi import APIRouter, Request
from google.protobuf.message import Message

from stagemesh.client.received_events import connector_name
from stagemesh.common.wire.encoding import enum_word
from stagemesh.gateway.catalog import Model, catalog_of, find_model
from stagemesh.v1 import orchestrator_pb2, signature_pb2, stage_pb2

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """Lists the models whose orchestrators can be reached."""
    return {"object": "list", "data": [_to_object(model) for model in await (await catalog_of(request)).models()]}


@router.get("/v1/models/{model_id}")
async def read_model(model_id: str, request: Request) -> dict[str, Any]:
    """Describes a model."""
    return _to_object(await find_model(request, model_id))


def _to_object(model: Model) -> dict[str, Any]:
    outputs = {output.name: output.stage for output in model.description.outputs}
    return {
        "id": model.id,
        "object": "model",
        "created": 0,
        "owned_by": "stagemesh",
        "outputs": sorted(outputs),
        "options": sorted(model.options),
    }


@router.get("/v1/stagemesh/pipelines/{name}")
async def read_pipeline(name: str, request: Request) -> dict[str, Any]:
    """Returns the state of a pipeline, as its orchestrator reports it to the caller. Never returns an older one."""
    model = await find_model(request, name)
    pipeline = await model.client.describe(model.description.pipeline)
    return {
        **_fields(pipeline, "pipeline", "generation", "in_flight", "max_in_flight", "queued", "max_queued"),
        "detects_turns": pipeline.detects_turns,
        "speaks_input": model.speaks_input,
        "stages": [_stage(each) for each in pipeline.stages],
        "edges": [_edge(each) for each in pipeline.edges],
        "outputs": [_output(each) for each in pipeline.outputs],
    }


def _fields(message: Message, *names: str) -> dict[str, Any]:
    """Returns the values of some fields of a message, by name."""
    return {name: getattr(message, name) for name in names}


def _stage(stage: orchestrator_pb2.StageDescription) -> dict[str, Any]:
    return {
        **_fields(stage, "name", "engine", "model"),
        "accepts_media": stage.signature.media,
        "replicas": [_replica(each) for each in stage.replicas],
    }


def _replica(replica: orchestrator_pb2.ReplicaStatus) -> dict[str, Any]:
    return {
        **_fields(replica, "name", "detail", "planned"),
        "state": enum_word(stage_pb2.ReplicaState.DESCRIPTOR, replica.state),
        "load": _load(replica.load) if replica.HasField("load") else None,
    }


def _load(load: stage_pb2.WatchLoadResponse) -> dict[str, Any]:
    return {
        **_fields(load, "running", "queued", "arena_used_bytes", "arena_size_bytes"),
        "work_s": load.work_s if load.HasField("work_s") else None,
    }


def _edge(edge: orchestrator_pb2.EdgeDescription) -> dict[str, Any]:
    return {
        "name": edge.name,
        "from": edge.from_stage,
        "to": edge.to_stage,
        "connector": connector_name(edge.connector),
        "links": [_link(each) for each in edge.links],
    }


def _link(link: orchestrator_pb2.EdgeLink) -> dict[str, Any]:
    return {
        **_fields(link, "producer", "consumer"),
        "connector": connector_name(link.connector) if link.connector else None,
        "error": link.error.message if link.HasField("error") else None,
    }


def _output(output: orchestrator_pb2.OutputDescription) -> dict[str, Any]:
    return {
        **_fields(output, "name", "stage", "stored"),
        "kind": enum_word(signature_pb2.TensorKind.DESCRIPTOR, output.kind),
    }
