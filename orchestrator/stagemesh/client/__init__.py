"""The Python client: `AsyncClient` and `Client` over the gRPC stubs, with typed events and results."""

from stagemesh.client.aio import AsyncClient, AsyncGeneration
from stagemesh.client.descriptions import (
    EdgeInfo,
    LinkInfo,
    OutputInfo,
    PipelineInfo,
    ReplicaInfo,
    ReplicaState,
    StageInfo,
)
from stagemesh.client.events import (
    Admitted,
    AudioChunk,
    EdgeUsage,
    Event,
    Finished,
    Image,
    Progress,
    StageReport,
    TensorOutput,
    Text,
    Timings,
    Tokens,
    Usage,
)
from stagemesh.client.requests import Conversation, GenerateArguments
from stagemesh.client.results import Audio, Result
from stagemesh.client.retries import RetryPolicy
from stagemesh.client.sync import Client, Generation
from stagemesh.client.wav import WavWriter

__all__ = [
    "Admitted",
    "AsyncClient",
    "AsyncGeneration",
    "Audio",
    "AudioChunk",
    "Client",
    "Conversation",
    "EdgeInfo",
    "EdgeUsage",
    "Event",
    "Finished",
    "GenerateArguments",
    "Generation",
    "Image",
    "LinkInfo",
    "OutputInfo",
    "PipelineInfo",
    "Progress",
    "ReplicaInfo",
    "ReplicaState",
    "Result",
    "RetryPolicy",
    "StageInfo",
    "StageReport",
    "TensorOutput",
    "Text",
    "Timings",
    "Tokens",
    "Usage",
    "WavWriter",
]
