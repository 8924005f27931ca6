"""The roles of the callers of RPCs, and the ports that serve them."""

import asyncio

import grpc
import pytest

from stagemesh.common.errors import UnsupportedError
from stagemesh.rpc.callers import CLIENT, OPERATOR, STAGE, Role, roles_of
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.rpc.server import Server
from stagemesh.v1 import membership_pb2, membership_pb2_grpc
from tests.rpc.health_calls import Request, check


class Members(membership_pb2_grpc.MembershipServiceServicer):
    """Accepts every replica."""

    async def Register(self, request_iterator: object, context: object) -> None:  # type: ignore[override]
        await context.write(membership_pb2.RegisterResponse(lease_s=1))  # type: ignore[attr-defined]


def test_the_roles_of_an_rpc_are_those_in_the_proto() -> None:
    assert roles_of("/stagemesh.v1.MembershipService/Register") == {STAGE}
    assert roles_of("/stagemesh.v1.OrchestratorService/Generate") == {CLIENT}
    assert roles_of("/grpc.health.v1.Health/Check") == frozenset()


@pytest.mark.parametrize(("roles", "served"), [({CLIENT, OPERATOR}, False), ({CLIENT, STAGE}, True)])
async def test_a_port_serves_the_rpcs_of_its_roles_alone(roles: set[Role], served: bool) -> None:
    server = Server("127.0.0.1:0", roles=roles)
    membership_pb2_grpc.add_MembershipServiceServicer_to_server(Members(), server.grpc)
    async with open_channel(f"127.0.0.1:{await server.start()}") as channel, asyncio.timeout(10):
        await check(channel)(Request())
        register = membership_pb2_grpc.MembershipServiceStub(channel).Register(iter(()))
        answer = register.read()
        if served:
            assert await answer == membership_pb2.RegisterResponse(lease_s=1)
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer
            error = from_rpc_error(caught.value, peer="x")
            assert isinstance(error, UnsupportedError)
            assert "this port serves clients and operators, and Register is for stages; call the" in error.message
    await server.stop(grace_s=0)
