"""Packets whose bytes all follow from request and number, so that a receiver can check them."""

import zlib
from functools import cache

import numpy as np
import numpy.typing as npt

from stagemesh.common.wire.tensors import Tensors
from stagemesh.connectors.arena.worker_writer import ArenaWriter, Handle
from stagemesh.connectors.packets import Packet

_SHIFTS = 1 << 16


def packet_of(request: str, seq: int, size_bytes: int) -> Packet:
    """Returns the packet of a number. It is cheap enough to be created at the speed of an edge."""
    start = zlib.crc32(f"{request}/{seq}".encode()) % _SHIFTS
    tensors: Tensors = {"x": _pool(size_bytes)[start : start + size_bytes], "n": np.array([seq], np.int64)}
    return Packet(tensors, {"seq": seq})


def is_packet_of(packet: Packet, *, request: str, seq: int, size_bytes: int) -> bool:
    """Returns whether a packet is, byte for byte, the one of that number."""
    expected = packet_of(request, seq, size_bytes)
    return (
        packet.metadata == expected.metadata
        and packet.tensors.keys() == expected.tensors.keys()
        and all(_same(packet.tensors[name], tensor) for name, tensor in expected.tensors.items())
    )


def _same(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic]) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())


@cache
def _pool(size_bytes: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(size_bytes).integers(0, 256, size_bytes + _SHIFTS, np.uint8)


def write_tensors(writer: ArenaWriter, tensors: Tensors, timeout_s: float) -> Handle:
    """Writes tensors into a worker's partition as a worker does. Waits up to `timeout_s` seconds for space."""
    reserved = writer.reserve(tensors, timeout_s=timeout_s)
    for name, tensor in tensors.items():
        reserved.tensors[name][...] = tensor
    return reserved.handle
