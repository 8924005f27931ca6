"""Sends requests until one of them runs on a given replica, and prints the time at which its first audio arrived.

Usage: python -m k8s.cluster.first_request ORCHESTRATOR_HOST REPLICA
"""

import asyncio
import sys
import time
import uuid

import grpc

from k8s.cluster.load import PROMPTS
from stagemesh.client import AsyncClient, AudioChunk
from stagemesh.v1 import admin_pb2, admin_pb2_grpc

_CONCURRENT = 2


async def main(host: str, replica: str) -> float:
    """Returns the time of the first audio, in seconds since 1970."""
    async with AsyncClient(f"{host}:7780") as client, grpc.aio.insecure_channel(f"{host}:7781") as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        states = [admin_pb2.REQUEST_STATE_FINISHED]
        while True:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_send(client, number)) for number in range(_CONCURRENT)]
            times = dict(task.result() for task in tasks)
            listed = await admin.ListRequests(admin_pb2.ListRequestsRequest(states=states, target=replica))
            if found := [times[each.request_id] for each in listed.requests if each.request_id in times]:
                return min(found)


async def _send(client: AsyncClient, number: int) -> tuple[str, float]:
    """Returns the request's id and the time of its first audio."""
    request_id = f"first-{uuid.uuid4().hex}"
    first_s = 0.0
    async for event in client.generate(PROMPTS[number], max_tokens=12, request_id=request_id):
        if isinstance(event, AudioChunk) and not first_s:
            first_s = time.time()
    return request_id, first_s


if __name__ == "__main__":
    print(asyncio.run(main(sys.argv[1], sys.argv[2])))
