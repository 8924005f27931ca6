"""How clients dial an orchestrator."""

from stagemesh.rpc import channels

_PING_TIMEOUT = "grpc.http2.ping_timeout_ms"

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *(option for option in channels.CHANNEL_OPTIONS if option[0] != _PING_TIMEOUT),
    # More patience than services have with each other, for machines that are loaded and links that are slow.
    (_PING_TIMEOUT, 2000),
)
