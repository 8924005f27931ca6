"""MembershipService: translates, and leaves every decision to the source."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, TypeAlias

from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.orchestrator.membership.registration import RegistrationSource
from stagemesh.rpc.handlers import answering, streaming
from stagemesh.v1 import membership_pb2, membership_pb2_grpc

if TYPE_CHECKING:
    import grpc

SERVICE_NAME = membership_pb2.DESCRIPTOR.services_by_name["MembershipService"].full_name

_Context: TypeAlias = "grpc.aio.ServicerContext[membership_pb2.RegisterRequest, membership_pb2.RegisterResponse]"


class MembershipServicer(membership_pb2_grpc.MembershipServiceServicer):
    """Serves one orchestrator's registration; None where it has none."""

    def __init__(self, source: RegistrationSource | None) -> None:
        self._source = source

    @streaming
    async def Register(  # noqa: N802
        self, request_iterator: AsyncIterator[membership_pb2.RegisterRequest], context: _Context
    ) -> AsyncIterator[membership_pb2.RegisterResponse]:
        """See the proto."""
        async with answering(context):
            source = self._source
            if source is None:
                raise NotReadyError(
                    "this orchestrator takes no replicas that register; list them in its config, or set "
                    "`registration` there",
                    reason="REGISTRATION_CLOSED",
                )
            first = await anext(request_iterator, None)
            if first is None or not first.HasField("replica"):
                raise InvalidRequestError("the first message must say who registers", reason="INVALID_REPLICA")
            lease = source.register(first.replica)
            try:
                yield membership_pb2.RegisterResponse(lease_s=source.lease_s)
                while await _next(request_iterator, source.closed):
                    source.renew(lease)
                    yield membership_pb2.RegisterResponse(lease_s=source.lease_s)
                # A connection that breaks may look like a side that ended, but takes no answer: this raises then.
                yield membership_pb2.RegisterResponse(lease_s=source.lease_s)
                source.leave(lease)
            finally:
                source.disconnect(lease)


async def _next(requests: AsyncIterator[membership_pb2.RegisterRequest], closed: asyncio.Event) -> bool:
    """Whether the replica sends a message, or else ends its side; NotReadyError where registering ends first."""
    reading, closing = asyncio.ensure_future(anext(requests, None)), asyncio.ensure_future(closed.wait())
    try:
        await asyncio.wait([reading, closing], return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise NotReadyError("the orchestrator stops; register again", reason="NOT_RUNNING")
        return reading.result() is not None
    finally:
        reading.cancel()
        closing.cancel()
