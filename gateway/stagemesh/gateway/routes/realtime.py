"""`/v1/realtime`: a conversation over a WebSocket, in which both sides may speak."""

from fastapi import APIRouter
from starlette.websockets import WebSocket

from stagemesh.gateway.errors import ParameterError
from stagemesh.gateway.json_socket import accept
from stagemesh.gateway.realtime.connection import Connection
from stagemesh.gateway.realtime.settings import Audio, InputAudio, ServerVad, Settings
from stagemesh.gateway.state import find_model

router = APIRouter()


@router.websocket("/v1/realtime")
async def converse(websocket: WebSocket) -> None:
    """Holds a conversation. A connection that cannot be served is rejected with an HTTP status."""
    settings = await accept(websocket, _settings(websocket))
    if settings is not None:
        await Connection(websocket, settings).run()


async def _settings(websocket: WebSocket) -> Settings:
    """Returns the settings with which a conversation begins: spoken, and with the detection of turns, if possible."""
    if not (model_id := websocket.query_params.get("model")):
        raise ParameterError("model", "it is missing; connect to /v1/realtime?model=NAME")
    model = await find_model(websocket, model_id)
    model.require_output("text")
    vad = ServerVad(type="server_vad") if model.description.detects_turns else None
    return Settings(
        model=model_id,
        output_modalities=["text" if model.output("audio") is None else "audio"],
        audio=Audio(input=InputAudio(turn_detection=vad)),
    )
