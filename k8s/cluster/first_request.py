"""Sends requests until one of them runs on a given replica.

Usage: python -m k8s.cluster.first_request ORCHESTRATOR_HOST REPLICA CLIENTS
Prints JSON: the times at which the first request was sent, at which the replica was first ready, and at which the first
output of a request that ran on it arrived, in seconds since 1970.
"""

import asyncio
import json
import sys
import time
import uuid

import grpc

from k8s.cluster.load import PROMPTS
from stagemesh.client import Admitted, AsyncClient
from stagemesh.v1 import admin_pb2, admin_pb2_grpc, stage_pb2

_POLL_S = 0.05
_PAGE = 200


async def main(host: str, replica: str, clients: int) -> dict[str, float]:
    """Returns the three times."""
    begun_s, first_s = time.time(), dict[str, float]()
    async with AsyncClient(f"{host}:7780") as client, grpc.aio.insecure_channel(f"{host}:7781") as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        sending = [asyncio.create_task(_send(client, prompt, first_s)) for prompt in (PROMPTS * clients)[:clients]]
        try:
            while not await _is_ready(admin, replica):  # noqa: ASYNC110 - the server reports no such event
                await asyncio.sleep(_POLL_S)
            ready_s = time.time()
            while not (served := await _requests_on(admin, replica) & first_s.keys()):  # noqa: ASYNC110 - as above
                await asyncio.sleep(_POLL_S)
        finally:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
    return {"begun_s": begun_s, "ready_s": ready_s, "served_s": min(first_s[each] for each in served)}


async def _send(client: AsyncClient, prompt: str, first_s: dict[str, float]) -> None:
    """Sends one request after another. Notes the time of the first output of each, by its id."""
    while True:
        request_id = f"first-{uuid.uuid4().hex}"
        async for event in client.generate(prompt, max_tokens=12, request_id=request_id):
            if not isinstance(event, Admitted):
                first_s.setdefault(request_id, time.time())


async def _is_ready(admin: "admin_pb2_grpc.AdminServiceAsyncStub", replica: str) -> bool:
    ready = await admin.ListReplicas(
        admin_pb2.ListReplicasRequest(state=stage_pb2.REPLICA_STATE_READY, page_size=_PAGE)
    )
    return replica in {each.name for each in ready.replicas}


async def _requests_on(admin: "admin_pb2_grpc.AdminServiceAsyncStub", replica: str) -> set[str]:
    states = [admin_pb2.REQUEST_STATE_RUNNING, admin_pb2.REQUEST_STATE_FINISHED]
    request = admin_pb2.ListRequestsRequest(states=states, target=replica, page_size=_PAGE)
    return {each.request_id for each in (await admin.ListRequests(request)).requests}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))))
