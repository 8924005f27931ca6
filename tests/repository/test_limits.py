"""The table of limits in docs/security.md has the values of the code."""

import re

import pytest

from stagemesh.common.media import videos
from stagemesh.common.process.media_config import MediaConfig
from stagemesh.common.process.stage_process import DataPlaneConfig, StageConfig
from stagemesh.common.wire import encoding, telemetry, tensors
from stagemesh.connectors import wire
from stagemesh.gateway.routes import transcriptions, voices
from stagemesh.jobs.config import JobServerConfig
from stagemesh.orchestrator.request.output_record import MAX_LINGER_S
from stagemesh.orchestrator.session.session import MAX_SESSION_LINGER_S
from stagemesh.pipeline import Limits
from stagemesh.rpc import authentication, call_limits, channels
from stagemesh.services.engines.vllm.options import StageOptions
from tests.repository.commands import ROOT

_LIMITS = Limits()
_CODE = {
    "bytes of a message of any RPC": [channels.MAX_MESSAGE_BYTES],
    "values, list elements and map entries of a message, and token ids of a list": [
        channels.MAX_FIELDS,
        encoding.MAX_TOKENS,
    ],
    "bytes of the headers of a call": [channels.MAX_HEADER_BYTES],
    "connections of a port": [channels.MAX_CONNECTIONS],
    "calls of a connection, and of a caller on the clients' port": [
        channels.MAX_CALLS_PER_CONNECTION,
        call_limits.CALLS_PER_CALLER,
    ],
    "seconds of a handshake, and of a connection without calls": [
        channels.HANDSHAKE_MS // 1000,
        channels.MAX_IDLE_MS // 1000,
    ],
    "characters of a token": [vars(authentication)["_MAX_TOKEN_LENGTH"]],
    "running requests, and their bytes": [_LIMITS.max_in_flight, _LIMITS.max_in_flight_bytes],
    "waiting requests, and their bytes": [_LIMITS.max_queued, _LIMITS.max_queued_bytes],
    "sessions, and bytes of a session": [_LIMITS.max_sessions, _LIMITS.max_session_bytes],
    "choices of a request": [_LIMITS.max_choices],
    "output bytes that a caller leaves unread": [_LIMITS.max_unread_bytes],
    "seconds for which a request or a session continues without a caller": [MAX_LINGER_S, MAX_SESSION_LINGER_S],
    "steps that a replica accepts at the same time": [StageConfig.max_queued],
    "unread bytes of a flow": [DataPlaneConfig().window_bytes],
    "bytes that the unread chunks of a flow take in addition to these": [wire.MAX_OVERHEAD_BYTES],
    "tensors of a chunk, and dimensions of a tensor": [wire.MAX_TENSORS, tensors.MAX_DIMENSIONS],
    "metadata values and tickets of a chunk": [wire.MAX_METADATA, wire.MAX_TICKETS],
    "bytes of a media file in a store": [MediaConfig.max_file_bytes],
    "files that a caller has uploaded, and their bytes": [MediaConfig.max_uploads, MediaConfig.max_upload_bytes],
    "jobs of a caller": [JobServerConfig.max_jobs_per_caller],
    "pixels of a video that are decoded": [vars(videos)["_MAX_DECODED_PIXELS"]],
    "seconds of a video": [vars(videos)["_MAX_DURATION_S"]],
    "bytes of the decoded media of a request, vllm stages": [StageOptions().media_bytes],
    "bytes of the decoded audio of a transcription with `verbose_json`, gateways": [transcriptions.MAX_DECODED_BYTES],
    "bytes of the decoded audio of a voice, gateways": [voices.MAX_DECODED_BYTES],
    "spans of a traced step": [telemetry.MAX_SPANS],
}


def _table() -> dict[str, list[int]]:
    section = (ROOT / "docs/security.md").read_text().partition("## Limits")[2]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", section, re.MULTILINE)
    return {name: [int(each.replace(",", "")) for each in re.findall(r"\b[0-9][0-9,]*", value)] for name, value in rows}


@pytest.mark.parametrize("name", _CODE)
def test_a_limit_has_the_value_of_the_code(name: str) -> None:
    assert _table()[name] == _CODE[name]
