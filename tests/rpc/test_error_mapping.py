import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc

from stagemesh.common import errors
from stagemesh.common.errors import StagemeshError
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.rpc.handlers import answering
from tests.rpc.health_calls import Request, check

CLASSES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, StagemeshError) and kind is not StagemeshError
]
FOREIGN = {
    grpc.StatusCode.UNAUTHENTICATED: errors.UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDeniedError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.DATA_LOSS: errors.InternalError,
}


class Failing(health_pb2_grpc.HealthServicer):
    """Fails every call with an error, or with a status that Stagemesh did not create."""

    def __init__(self, failure: StagemeshError | grpc.StatusCode) -> None:
        self.failure = failure

    async def Check(self, request: object, context: grpc.aio.ServicerContext[object, object]) -> None:
        async with answering(context):
            if isinstance(self.failure, StagemeshError):
                raise self.failure
            await context.abort(self.failure, "a proxy rejects the call")


async def received(failure: StagemeshError | grpc.StatusCode) -> StagemeshError:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(Failing(failure), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check(channel)(Request())
        return from_rpc_error(caught.value, peer="it")
    finally:
        await server.stop(None)


@pytest.mark.parametrize("kind", CLASSES)
async def test_every_error_arrives_as_it_was_raised(kind: type[StagemeshError]) -> None:
    error = await received(kind("full", metadata={"edge": "a->b"}, retry_after_s=0.5))
    assert (type(error), error.code, error.message) == (kind, kind.code, "full")
    assert (error.reason, error.metadata, error.retry_after_s) == (kind("").reason, {"edge": "a->b"}, 0.5)


@pytest.mark.parametrize(("code", "kind"), FOREIGN.items())
async def test_a_status_of_a_proxy_becomes_the_error_of_its_code(
    code: grpc.StatusCode, kind: type[StagemeshError]
) -> None:
    error = await received(code)
    assert (type(error), error.reason, error.metadata) == (kind, kind("").reason, {"peer": "it"})
    assert "a proxy rejects the call" in error.message
