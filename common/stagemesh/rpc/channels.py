"""How Stagemesh dials a service."""

import grpc

MAX_MESSAGE_BYTES = 8 << 20

_PINGS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # A silent link is noticed within three seconds; a killed peer at once. More often would cost an orchestrator of a
    # hundred idle replicas a few per cent of a core.
    ("grpc.keepalive_time_ms", 2000),
    *_PINGS,
    # Keepalive alone takes the kernel's word. A process that is stopped, and whose kernel answers for it, is found out
    # by a ping that it leaves unanswered. gRPC's own threads answer, whatever holds the interpreter's lock.
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    # A channel is a connection of its own: what is opened apart is meant to be.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # In truth the longest that one attempt may take, its handshake included: a peer that is loaded or far away needs
    # more than a round trip, and a lost SYN is sent again after a second.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    # It is for the caller to be quick: it has somewhere else to go.
    ("grpc.keepalive_time_ms", 10_000),
    *_PINGS,
    # Take our own clients' keepalive pings for what they are, not for an attack.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # What a connection may have on its way unread. The probe would let it grow to many times that on a fast network,
    # and other connections' small messages wait while all of it is taken in.
    ("grpc.http2.lookahead_bytes", 2 << 20),
    ("grpc.http2.bdp_probe", 0),
    # A port in use is an error, not a second server beside the first.
    ("grpc.so_reuseport", 0),
)


def open_channel(endpoint: str, *, keepalive_s: float | None = None) -> grpc.aio.Channel:
    """A channel to "host:port", which the caller closes; `keepalive_s` where its silence need not be noticed soon."""
    options = dict(CHANNEL_OPTIONS)
    if keepalive_s is not None:
        options["grpc.keepalive_time_ms"] = round(1000 * keepalive_s)
    return grpc.aio.insecure_channel(endpoint, options=list(options.items()))
