"""Runs a peer in another process on this host: `python -m stagemesh.connectors.transport_probe.second_process`."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import grpc
import uvloop

from stagemesh.common.errors import NotReadyError, StagemeshError
from stagemesh.connectors.transport_probe.peer import ProbePeer
from stagemesh.rpc.channels import SERVER_OPTIONS

_HOST = "127.0.0.1"
_START_S = 20.0
_END_S = 5.0


@asynccontextmanager
async def second_process() -> AsyncGenerator[str]:
    """Starts a peer process on this host and yields the peer's endpoint.

    The peer process terminates at the end of the `async with` block, or when this process terminates.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", __name__, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        yield await _endpoint_of(process)
    finally:
        # The peer process ends when its standard input is closed.
        try:
            await asyncio.wait_for(process.communicate(b""), _END_S)
        except TimeoutError:
            process.kill()
            await process.communicate()


async def _endpoint_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), _START_S)
    except TimeoutError:
        message = f"a second process did not start within {_START_S:g} s; try again"
        raise NotReadyError(message, reason="START_FAILED") from None
    if not line:
        said = (await process.stderr.read()).decode().strip()
        raise NotReadyError(f"a second process cannot be measured: {said}", reason="START_FAILED")
    return line.decode().strip()


async def _serve() -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    async with ProbePeer.added_to(server):
        port = server.add_insecure_port(f"{_HOST}:0")
        await server.start()
        sys.stdout.write(f"{_HOST}:{port}\n")
        sys.stdout.flush()
        await _end_of_input()
        await server.stop(0)


async def _end_of_input() -> None:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    await reader.read()


def _main() -> int:
    try:
        uvloop.run(_serve())
    except StagemeshError as exc:
        sys.stderr.write(exc.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
