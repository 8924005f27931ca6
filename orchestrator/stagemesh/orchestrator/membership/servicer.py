"""MembershipService: converts messages and calls the registration source."""

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
    """Serves MembershipService for one orchestrator. Rejects all registrations if `source` is None."""

    def __init__(self, source: RegistrationSource | None) -> None:
        self._source = source

    @streaming
    async def Register(
        self, request_iterator: AsyncIterator[membership_pb2.RegisterRequest], context: _Context
    ) -> AsyncIterator[membership_pb2.RegisterResponse]:
        async with answering(context):
            source = self._source
            if source is None:
                raise NotReadyError(
                    "replicas cannot register with this orchestrator; list them in its config, or set "
                    "`registration` there",
                    reason="REGISTRATION_CLOSED",
                )
            first = await anext(request_iterator, None)
            if first is None or not first.HasField("replica"):
                raise InvalidRequestError(
                    "the first message must contain the replica's identity", reason="INVALID_REPLICA"
                )
            lease = source.register(first.replica)
            try:
                yield membership_pb2.RegisterResponse(lease_s=source.lease_s)
                while await _next(request_iterator, source.closed):
                    source.renew(lease)
                    yield membership_pb2.RegisterResponse(lease_s=source.lease_s)
                # A broken connection may look like the orderly end of the replica's stream. This answer raises in that
                # case.
                yield membership_pb2.RegisterResponse(lease_s=source.lease_s)
                source.leave(lease)
            finally:
                source.disconnect(lease)


async def _next(requests: AsyncIterator[membership_pb2.RegisterRequest], closed: asyncio.Event) -> bool:
    """Waits for the replica's next message.

    Returns False if the replica closes its stream instead of sending a message.

    Raises NotReadyError (NOT_RUNNING) if the orchestrator stops before.
    """
    reading, closing = asyncio.ensure_future(anext(requests, None)), asyncio.ensure_future(closed.wait())
    try:
        await asyncio.wait([reading, closing], return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise NotReadyError("the orchestrator stops; register again", reason="NOT_RUNNING")
        return reading.result() is not None
    finally:
        reading.cancel()
        closing.cancel()
