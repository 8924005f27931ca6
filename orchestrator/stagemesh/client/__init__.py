"""The Python client: `AsyncClient` and `Client`, with typed events and results."""

from stagemesh.client.async_client import AsyncClient, AsyncGeneration
from stagemesh.client.events import (
    Admitted,
    AudioChunk,
    EdgeUsage,
    Event,
    Finished,
    Image,
    Progress,
    Queued,
    StageReport,
    TensorOutput,
    Text,
    Timings,
    TokenLogprobs,
    Tokens,
    Usage,
)
from stagemesh.client.media import AudioFile, AudioSamples, Content, ImageFile, Part, VideoFile, read_media
from stagemesh.client.requests import Conversation, GenerateArguments
from stagemesh.client.results import Audio, Result
from stagemesh.client.retries import RetryPolicy
from stagemesh.client.sync_client import Client, Generation
from stagemesh.client.wav import WavWriter

__all__ = [
    "Admitted",
    "AsyncClient",
    "AsyncGeneration",
    "Audio",
    "AudioChunk",
    "AudioFile",
    "AudioSamples",
    "Client",
    "Content",
    "Conversation",
    "EdgeUsage",
    "Event",
    "Finished",
    "GenerateArguments",
    "Generation",
    "Image",
    "ImageFile",
    "Part",
    "Progress",
    "Queued",
    "Result",
    "RetryPolicy",
    "StageReport",
    "TensorOutput",
    "Text",
    "Timings",
    "TokenLogprobs",
    "Tokens",
    "Usage",
    "VideoFile",
    "WavWriter",
    "read_media",
]
