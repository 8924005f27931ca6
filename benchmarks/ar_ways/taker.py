"""The replica that consumes hidden states: a process that receives every chunk and counts the rows."""

import asyncio

import grpc

from benchmarks.ar_ways.client import EDGE, STATES, Taker
from benchmarks.ar_ways.workload import OUTPUT_TOKENS, PROMPT_TOKENS, Turn
from benchmarks.edge_ways.plane import stage_service
from benchmarks.edge_ways.worker import End
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.edge import EdgeKey, Inlet
from stagemesh.rpc.channels import SERVER_OPTIONS

PIPELINE, GENERATION, PRODUCER = "benchmark", "1", "ar-0"
_REPLICA = "taker-0"
# The last sampled token is not an input of the model any more, so it has no hidden state.
_ROWS = PROMPT_TOKENS + OUTPUT_TOKENS - 1


class StatesTaker(End):
    """Receives the hidden states of one turn at a time."""

    async def open(self) -> None:
        """Starts listening."""
        self._plane = DataPlane(replica=_REPLICA, pipeline=PIPELINE, generation=GENERATION)
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((stage_service(self._plane),))
        port = self._server.add_insecure_port(f"{self.place.address}:0")
        await self._server.start()
        self._taker = Taker(_REPLICA, f"{self.place.address}:{port}")
        self._taking: list[asyncio.Task[None]] = []

    async def close(self) -> None:
        """Closes the flows that are left, and the server."""
        await self._plane.close()
        await self._server.stop(None)

    async def where(self) -> Taker:
        """Returns the address of this replica."""
        return self._taker

    async def begin(self, turn: Turn) -> None:
        """Opens the flows of all requests and receives their chunks as they arrive."""
        for stream in range(turn.streams):
            for request_id in turn.request_ids(stream):
                inlet = self._plane.open_inlet(EdgeKey(request_id, EDGE, 1), producer=PRODUCER)
                self._taking.append(asyncio.create_task(_take(inlet)))

    async def end(self) -> None:
        """Returns when all chunks have arrived."""
        await asyncio.gather(*self._taking)
        self._taking.clear()


async def _take(inlet: Inlet) -> None:
    rows = 0
    async for packet in inlet:
        assert packet.metadata["token_start"] == rows, "rows come in order"
        rows += len(packet.tensors[STATES])
    assert rows == _ROWS, f"{rows} rows came of {_ROWS}"
    await inlet.aclose()
