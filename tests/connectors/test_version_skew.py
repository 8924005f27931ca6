"""The versions and offers of producers and consumers of other versions.

The cases of `stagemesh conformance` have unknown fields, kinds and enum values.
"""

import grpc
import pytest

from stagemesh.common.errors import NotReadyError
from stagemesh.common.plugins.connectors import SHM
from stagemesh.v1.protocol_pb2 import Protocol
from tests.connectors.handmade_producers import hello, peer
from tests.connectors.test_hostile_consumers import scene


@pytest.mark.parametrize(
    ("protocol", "older"),
    [
        (Protocol(lowest_version=2, highest_version=3, software="stagemesh 9"), "consumer b-0"),
        (Protocol(), "producer a-0"),
        (Protocol(highest_version=1), "producer a-0"),
    ],
    ids=["newer", "none", "no lowest"],
)
async def test_a_consumer_refuses_a_producer_without_a_common_version(protocol: Protocol, older: str) -> None:
    async with peer(hello(protocol=protocol)) as producer:
        with pytest.raises(grpc.aio.AioRpcError, match=f"producer a-0 speaks .*consumer b-0 speaks .*upgrade {older}"):
            await producer.call.read()


async def test_a_producer_offers_nothing_to_a_consumer_without_that_feature() -> None:
    async with scene() as it:
        del it.consumer.welcome.welcome.protocol.features[:]
        it.consumer.accepts_offers = [False] * 9
        assert (await it.send("auto", connector="auto")).attempt.connector == "grpc"
        with pytest.raises(NotReadyError, match="does not support offers"):
            await it.send("fixed", connector=SHM)
        assert len(it.consumer.accepts_offers) == 9
