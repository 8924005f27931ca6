"""gRPC channels, and the options of channels and servers: message size limits, keepalive and reconnection."""

import asyncio
import json
from collections.abc import Sequence
from typing import TypeAlias

import grpc

from stagemesh.rpc.credentials import PROCESS, Credentials

ChannelOptions: TypeAlias = Sequence[tuple[str, int | str]]

MAX_MESSAGE_BYTES = 8 << 20  # the limit for each message of every RPC and local stream
MAX_FIELDS = 8192  # the limit for the fields of a message (`wire.encoding.count_fields`), except between services
MAX_ANSWER_FIELDS = 1 << 17  # the same for an answer of a stage, which has the events of many steps
MAX_NAME = 256  # the limit for the characters of a name or an address that a stage reports
MAX_HEADER_BYTES = 16 << 10  # the limit for the headers of a call
MAX_CALLS_PER_CONNECTION = 128  # gRPC's clients open further connections for more calls
MAX_CONNECTIONS = 16_384  # of one port
HANDSHAKE_MS = 10_000
MAX_IDLE_MS = 30 * 60 * 1000  # then a connection without calls is closed; gRPC's clients connect again when they call

_CONNECTIONS = 64
_DIAL_S = 1.0
_PINGS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    # A silent connection is detected within three seconds, and a killed peer immediately. More frequent pings would
    # use a few percent of a core in an orchestrator with a hundred idle replicas.
    ("grpc.keepalive_time_ms", 2000),
    *_PINGS,
    # The kernel of a stopped process still acknowledges data, which satisfies keepalive. Only an unanswered ping
    # detects such a process. A busy process answers in time, because gRPC's threads do not need the interpreter's lock.
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    # Gives each channel its own connections: a further one when all have as many calls as the server permits.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_connections_per_subchannel_cap", _CONNECTIONS),
    ("grpc.service_config", json.dumps({"connectionScaling": {"maxConnectionsPerSubchannel": _CONNECTIONS}})),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Despite its name, this option limits the time of one connection attempt, including the handshake. A loaded or
    # distant peer needs more than one round trip, and a lost SYN is sent again after a second.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    # A server pings less often, because only the client, which can use another replica, must detect loss quickly.
    ("grpc.keepalive_time_ms", 10_000),
    *_PINGS,
    # Many pings do no harm: gRPC answers millions a second. Peers that are disconnected for them, and return, do.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
    # A peer that does not finish the handshake of TLS or of HTTP/2 is disconnected.
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ("grpc.http2.settings_timeout", HANDSHAKE_MS),
    ("grpc.max_connection_idle_ms", MAX_IDLE_MS),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.absolute_max_metadata_size", MAX_HEADER_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Limits the unread bytes in flight on a connection. On a fast network, the bandwidth probe would raise this limit
    # to a multiple, and small messages of other connections would wait while the server reads all of these bytes.
    ("grpc.http2.lookahead_bytes", 2 << 20),
    ("grpc.http2.bdp_probe", 0),
    # Makes a port that is in use an error instead of starting a second server on the same port.
    ("grpc.so_reuseport", 0),
)


def named_options(options: ChannelOptions, server_name: str) -> ChannelOptions:
    """Returns channel options with the name in the server's TLS certificate, or the same options if it is empty."""
    return (*options, ("grpc.ssl_target_name_override", server_name)) if server_name else options


def open_channel(
    endpoint: str,
    *,
    server_name: str = "",
    keepalive_s: float = 2.0,
    ping_timeout_s: float = 1.0,
    pings_without_calls: bool = True,
) -> grpc.aio.Channel:
    """Opens and returns a channel to `endpoint` ("host:port"). The caller must close the channel.

    The channel uses the credentials of this process (`rpc.credentials`), or no TLS if it has none. `server_name` is the
    name in the server's TLS certificate, or empty if it is the host in `endpoint`.

    `keepalive_s` is the number of seconds between keepalive pings. A connection is closed if a ping is not answered
    within `ping_timeout_s` seconds. By default, a silent connection is detected within three seconds. If
    `pings_without_calls` is False, no pings are sent while the channel has no calls.
    """
    options = dict[str, int | str](named_options(CHANNEL_OPTIONS, server_name))
    options["grpc.keepalive_time_ms"] = round(1000 * keepalive_s)
    options["grpc.keepalive_timeout_ms"] = options["grpc.http2.ping_timeout_ms"] = round(1000 * ping_timeout_s)
    options["grpc.keepalive_permit_without_calls"] = int(pings_without_calls)
    return open_async(endpoint, PROCESS.credentials, list(options.items()))


def open_async(endpoint: str, credentials: Credentials, options: ChannelOptions) -> grpc.aio.Channel:
    """Opens and returns a channel for asyncio programs. The caller must close the channel."""
    secure = credentials.for_channel()
    if secure is None:
        return grpc.aio.insecure_channel(endpoint, options=options)
    return grpc.aio.secure_channel(endpoint, secure, options=options)


def open_sync(endpoint: str, credentials: Credentials, options: ChannelOptions) -> grpc.Channel:
    """Opens and returns a channel for programs without asyncio. The caller must close the channel."""
    secure = credentials.for_channel()
    if secure is None:
        return grpc.insecure_channel(endpoint, options=options)
    return grpc.secure_channel(endpoint, secure, options=options)


async def is_listening(endpoint: str) -> bool | None:
    """Attempts one connection to `endpoint` ("host:port"). Returns False if the host refuses it: no process listens.

    Returns None if that is not certain, because the host did not answer within a second.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        async with asyncio.timeout(_DIAL_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return False
    except (OSError, TimeoutError, ValueError):
        return None
    writer.close()
    return True
