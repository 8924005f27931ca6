"""gRPC channels and the options of channels and servers: limits, keepalive, reconnection."""

import grpc

MAX_MESSAGE_BYTES = 8 << 20  # the largest message of every RPC and local stream

_PINGS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # A silent connection is detected within three seconds, a killed peer at once. More frequent pings would cost an
    # orchestrator of a hundred idle replicas a few per cent of a core.
    ("grpc.keepalive_time_ms", 2000),
    *_PINGS,
    # Keepalive alone trusts the peer's kernel. A stopped process, whose kernel still acknowledges data, is detected by
    # an unanswered ping. A busy process answers in time, because gRPC's own threads do not need the interpreter's lock.
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    # Each channel has a connection of its own.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # In fact the longest time of one connection attempt, including its handshake. A loaded or distant peer needs more
    # than one round trip, and a lost SYN is sent again after a second.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    # Only the caller must detect a lost connection quickly: it can use another replica.
    ("grpc.keepalive_time_ms", 10_000),
    *_PINGS,
    # Accept our own clients' keepalive pings, which gRPC would otherwise count as an attack.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # The unread bytes in flight on a connection. The bandwidth probe would raise them to many times that on a fast
    # network, and small messages of other connections would wait while all of them are read.
    ("grpc.http2.lookahead_bytes", 2 << 20),
    ("grpc.http2.bdp_probe", 0),
    # A port in use is an error, not a second server on the same port.
    ("grpc.so_reuseport", 0),
)


def open_channel(endpoint: str, *, keepalive_s: float | None = None) -> grpc.aio.Channel:
    """Opens a channel to "host:port", which the caller closes.

    `keepalive_s` is the time between keepalive pings. The default detects a silent connection within three seconds.
    """
    options = dict(CHANNEL_OPTIONS)
    if keepalive_s is not None:
        options["grpc.keepalive_time_ms"] = round(1000 * keepalive_s)
    return grpc.aio.insecure_channel(endpoint, options=list(options.items()))
