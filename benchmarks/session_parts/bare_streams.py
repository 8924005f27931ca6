"""A minimal grpc.aio server, whose streams answer the first message and then wait for further ones.

Its memory per stream is what gRPC itself needs for an open call.
"""

import argparse
import asyncio
from typing import Any, cast

import grpc
import uvloop

from stagemesh.rpc.server import Server


async def _answer(requests: object, context: Any) -> None:  # noqa: ARG001 - `context` reads them
    while isinstance(message := await context.read(), bytes):
        await context.write(message)


async def serve(listen: str) -> None:
    """Serves until the process is terminated."""
    server = Server(listen)
    by_stream = cast("Any", grpc.stream_stream_rpc_method_handler)
    server.grpc.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bare.Streams", {"Open": by_stream(_answer)}),)
    )
    await server.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True, help="Listen at this address, HOST:PORT.")
    uvloop.run(serve(parser.parse_args().listen))
