"""Runs functions that convert codec frames to audio."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call, Function

Codes = npt.NDArray[np.int32]
Samples = npt.NDArray[np.float32]

SEED = 5


def joined(made: Sequence[Packet]) -> Samples:
    """Returns the audio of packets."""
    parts = [packet.tensors["audio"].astype(np.float32, copy=False) for packet in made]
    return np.concatenate([np.zeros(0, np.float32), *parts])


def parts(total: int, cuts: Iterable[int]) -> list[slice]:
    """Divides a sequence of `total` elements before the positions in `cuts`."""
    places = [0, *sorted({min(cut, total) for cut in cuts}), total]
    return [slice(start, end) for start, end in itertools.pairwise(places)]


def pieces(codes: Codes, cuts: Iterable[int]) -> list[Codes]:
    """Divides codes before the frames in `cuts`."""
    return [codes[part] for part in parts(len(codes), cuts)]


def push(vocoder: Function[Any], state: object, codes: Codes | None) -> Samples:
    """Decodes the next frames of a stream, or its end if `codes` is None."""
    (samples,) = push_all(vocoder, [state], [codes])
    return samples


def push_all(vocoder: Function[Any], states: Sequence[object], codes: Sequence[Codes | None]) -> list[Samples]:
    """Decodes the next frames, or the end, of several streams in one batch."""
    packets = [None if each is None else Packet({"codes": each}) for each in codes]
    return [joined(made) for made in vocoder([Call(*each) for each in zip(states, packets, strict=True)])]


def decode(vocoder: Function[Any], codes: Codes, cuts: Iterable[int] = (), **options: str) -> Samples:
    """Decodes a stream whose frames arrive in pieces."""
    (samples,) = decode_together(vocoder, [pieces(codes, cuts)], **options)
    return samples


def decode_together(vocoder: Function[Any], streams: Sequence[Sequence[Codes]], **options: str) -> list[Samples]:
    """Decodes streams with equally many pieces. Their pieces of one number share a batch."""
    states = [vocoder.open(seed=SEED, options=options) for _ in streams]
    ends: Sequence[Codes | None] = [None] * len(states)
    heard = [push_all(vocoder, states, codes) for codes in [*zip(*streams, strict=True), ends]]
    return [np.concatenate(parts) for parts in zip(*heard, strict=True)]
