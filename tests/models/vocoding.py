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


def joined(made: Sequence[Packet]) -> Samples:
    """Returns the audio of packets."""
    parts = [packet.tensors["audio"].astype(np.float32, copy=False) for packet in made]
    return np.concatenate([np.zeros(0, np.float32), *parts])


def pieces(codes: Codes, cuts: Iterable[int]) -> list[Codes]:
    """Divides codes before the frames in `cuts`."""
    places = [0, *sorted({min(cut, len(codes)) for cut in cuts}), len(codes)]
    return [codes[start:end] for start, end in itertools.pairwise(places)]


def push(vocoder: Function[Any], state: object, codes: Codes | None) -> Samples:
    """Decodes the next frames of a stream, or its end if `codes` is None."""
    (made,) = vocoder([Call(state, None if codes is None else Packet({"codes": codes}))])
    return joined(made)


def push_all(vocoder: Function[Any], states: Sequence[object], codes: Sequence[Codes]) -> list[Samples]:
    """Decodes the next frames of several streams in one batch."""
    calls = [Call(state, Packet({"codes": each})) for state, each in zip(states, codes, strict=True)]
    return [joined(made) for made in vocoder(calls)]


def decode(vocoder: Function[Any], codes: Codes, cuts: Iterable[int] = ()) -> Samples:
    """Decodes a stream whose frames arrive in pieces."""
    state = vocoder.open(seed=0, options={})
    return np.concatenate([push(vocoder, state, piece) for piece in pieces(codes, cuts)])
