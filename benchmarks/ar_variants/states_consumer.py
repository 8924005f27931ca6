"""The consumer of hidden states: a process that receives every chunk and counts the rows."""

import asyncio

import grpc

from benchmarks.ar_variants.client import EDGE, STATES, Consumer
from benchmarks.ar_variants.workload import OUTPUT_TOKENS, PROMPT_TOKENS, Trial
from benchmarks.edge_ways.plane import stage_service
from benchmarks.edge_ways.worker import End
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.packets import EdgeKey
from stagemesh.rpc.channels import SERVER_OPTIONS

PIPELINE, GENERATION, PRODUCER = "benchmark", "1", "ar-0"
_REPLICA = "consumer-0"
# The last sampled token does not go through the model.
_ROWS = PROMPT_TOKENS + OUTPUT_TOKENS - 1


class StatesConsumer(End):
    """Consumes the hidden states of one trial at a time."""

    async def open(self) -> None:
        """Starts to listen."""
        self._plane = DataPlane(replica=_REPLICA, pipeline=PIPELINE, generation=GENERATION)
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((stage_service(self._plane),))
        port = self._server.add_insecure_port(f"{self.place.address}:0")
        await self._server.start()
        self._consumer = Consumer(_REPLICA, f"{self.place.address}:{port}")
        self._consuming: list[asyncio.Task[None]] = []

    async def close(self) -> None:
        """Closes the data plane and the server."""
        await self._plane.close()
        await self._server.stop(None)

    async def address(self) -> Consumer:
        """Returns this consumer's address."""
        return self._consumer

    async def begin(self, trial: Trial) -> None:
        """Starts to consume the chunks of all requests of a trial."""
        for stream in range(trial.streams):
            for request_id in trial.request_ids(stream):
                inlet = self._plane.open_inlet(EdgeKey(request_id, EDGE, 1), producer=PRODUCER)
                self._consuming.append(asyncio.create_task(_consume(inlet)))

    async def end(self) -> None:
        """Returns when all chunks have arrived."""
        await asyncio.gather(*self._consuming)
        self._consuming.clear()


async def _consume(inlet: Inlet) -> None:
    rows = 0
    async for packet in inlet:
        assert packet.metadata["token_start"] == rows, "rows arrive in order"
        rows += len(packet.tensors[STATES])
    assert rows == _ROWS, f"{rows} rows arrived of {_ROWS}"
    await inlet.aclose()
