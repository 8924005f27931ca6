"""`/v1/models`: the pipelines."""

from typing import Any

from fastapi import APIRouter, Request

from stagemesh.gateway.catalog import Model
from stagemesh.gateway.state import Callers, find_model

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """Lists the models whose orchestrators can be reached."""
    callers: Callers = request.app.state.callers
    models = await (await callers.catalog(request)).models()
    return {"object": "list", "data": [_to_object(model) for model in models]}


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
