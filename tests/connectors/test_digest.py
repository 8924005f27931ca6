"""The digest of a flow: the test vectors of the contract, and its definition in the fewest lines."""

import asyncio
import hashlib
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagemesh.common.wire.tensors import DTYPES
from stagemesh.connectors.packets import Packet, ReceivedTicket
from stagemesh.connectors.wire import FlowDigest, PacketShape
from stagemesh.v1 import tensor_pb2

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "protos/digest_vectors.json").read_text())


def _packet(chunk: dict[str, Any]) -> Packet:
    types = {each["name"]: (each["data_type"].lower(), each["shape"]) for each in chunk["tensors"]}
    tensors = {name: np.empty(shape, DTYPES[dtype]) for name, (dtype, shape) in types.items() if dtype in DTYPES}
    return Packet(tensors, tickets={name: _ticket() for name in types if name not in tensors})


def _ticket() -> ReceivedTicket:
    return ReceivedTicket(
        "test.state", b"", size_bytes=1, time_limit_s=1, accept=lambda: asyncio.sleep(0), on_release=lambda: None
    )


def _described(chunk: dict[str, Any]) -> bytes:
    """Returns a chunk's bytes in the digest, as ChunkEnd.digest defines them."""
    described = struct.pack("<I", len(chunk["tensors"]))
    for each in chunk["tensors"]:
        name, shape = each["name"].encode(), each["shape"]
        number = tensor_pb2.DataType.Value(f"DATA_TYPE_{each['data_type']}")
        described += struct.pack("<I", len(name)) + name + struct.pack("<II", number, len(shape))
        described += b"".join(struct.pack("<Q", length) for length in shape)
    return described


@pytest.mark.parametrize("vector", VECTORS, ids=[each["name"] for each in VECTORS])
def test_a_vector_has_its_digest(vector: dict[str, Any]) -> None:
    digest = FlowDigest()
    for chunk in vector["chunks"]:
        digest.add(PacketShape(_packet(chunk)))
    end = digest.end()
    assert (end.count, end.digest.hex()) == (vector["count"], vector["sha256"])


@pytest.mark.parametrize("vector", VECTORS, ids=[each["name"] for each in VECTORS])
def test_a_vector_follows_the_definition(vector: dict[str, Any]) -> None:
    runs = itertools.groupby(map(_described, vector["chunks"]))
    content = b"".join(struct.pack("<Q", len(list(run))) + described for described, run in runs)
    assert content.hex() == vector["digested_hex"]
    assert hashlib.sha256(content).hexdigest() == vector["sha256"]


def test_every_vector_has_a_digest_of_its_own() -> None:
    assert len({each["sha256"] for each in VECTORS}) == len(VECTORS)
