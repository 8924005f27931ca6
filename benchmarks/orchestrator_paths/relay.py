"""A minimal grpc.aio relay between a client and a stage: forwards messages without deserializing them.

    python -m benchmarks.orchestrator_paths.relay --listen HOST:PORT

Callers of ExecuteStep give the stage's address in the metadata. Runs until SIGTERM.
"""

import argparse
import asyncio
import os
from collections.abc import Awaitable
from typing import Any, cast

import grpc

from stagemesh.common.process.lifecycle import run_service
from stagemesh.rpc.channels import SERVER_OPTIONS, open_channel
from stagemesh.v1 import stage_pb2

UPSTREAM = "upstream"
_SERVICE = stage_pb2.DESCRIPTOR.services_by_name["StageService"].full_name


class _Relay:
    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def execute(self, request: bytes, context: Any) -> None:
        call = cast("Any", self._channel(context)).unary_stream(f"/{_SERVICE}/ExecuteStep")(request)
        try:
            async for message in call:
                await context.write(message)
        finally:
            call.cancel()

    def _channel(self, context: Any) -> grpc.aio.Channel:
        endpoint = dict(context.invocation_metadata())[UPSTREAM]
        if endpoint not in self._channels:
            self._channels[endpoint] = open_channel(endpoint)
        return self._channels[endpoint]

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


def main() -> int:
    """Serves the relay until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True, help="Listen at this address, host:port.")
    arguments = parser.parse_args()

    async def serve(stopping: asyncio.Event) -> None:
        relay, server = _Relay(), grpc.aio.server(options=SERVER_OPTIONS)
        handler = cast("Any", grpc.unary_stream_rpc_method_handler)(relay.execute)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"ExecuteStep": handler}),))
        server.add_insecure_port(arguments.listen)
        await cast("Awaitable[None]", server.start())
        await stopping.wait()
        await server.stop(0)
        await relay.close()

    return run_service(serve, parent_pid=os.getppid())


if __name__ == "__main__":
    raise SystemExit(main())
