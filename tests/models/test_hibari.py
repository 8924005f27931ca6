"""The streaming vocoder compared with itself on other packet boundaries, and with hibari's own."""

from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
from hibari import dsp
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.common.wire.tensors import Array
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call
from stagemesh.services.models.hibari.acoustic import AcousticModel
from stagemesh.services.models.hibari.vocoder import Vocoder, VocoderStream
from tests.models.vocoding import joined, parts

SENTENCES = (b"Yes.", b"The quick brown fox jumps over the lazy dog, twice.")
SEED = 5


def _speak(sentence: bytes, **options: float) -> Packet:
    model = AcousticModel(None, {})
    call = Call(model.open(seed=0, options=options), Packet({"text": np.frombuffer(sentence, np.uint8)}))
    ((frames,),) = model([call])
    return frames


@pytest.fixture(scope="module")
def spoken() -> dict[str, Array]:
    packets = [_speak(sentence) for sentence in SENTENCES]
    return {name: np.concatenate([packet.tensors[name] for packet in packets]) for name in packets[0].tensors}


def _audio(frames: dict[str, Array], cuts: list[int]) -> npt.NDArray[np.float32]:
    stream = VocoderStream(SEED)
    return joined([out for part in parts(len(frames["f0"]), cuts) for out in stream.push(_packet(frames, part))])


def _packet(frames: dict[str, Array], part: slice) -> Packet:
    return Packet({name: tensor[part] for name, tensor in frames.items()})


@given(cuts=st.lists(st.integers(0, 500), max_size=60))
@settings(max_examples=40, deadline=None)
def test_packet_boundaries_do_not_change_a_bit(spoken: dict[str, Array], cuts: list[int]) -> None:
    np.testing.assert_array_equal(_audio(spoken, cuts), _audio(spoken, []))


@given(cut=st.integers(0, 500))
@settings(max_examples=40, deadline=None)
def test_a_restored_stream_continues_bit_for_bit(spoken: dict[str, Array], cut: int) -> None:
    vocoder = Vocoder(None, {})
    stream = vocoder.open(seed=SEED, options={})
    begin, end = _packet(spoken, slice(cut)), _packet(spoken, slice(cut, None))
    first = [*stream.push(begin)]
    # A stream that continues must not change what was saved.
    saved = {name: tensor.copy() for name, tensor in vocoder.save(stream).items()}
    whole = vocoder.save(stream)
    rest = joined([*stream.push(end)])
    assert all(np.array_equal(tensor, whole[name]) for name, tensor in saved.items())
    restored = [*vocoder.restore(saved, seed=0, options={}).push(end)]
    np.testing.assert_array_equal(joined(restored), rest)
    np.testing.assert_array_equal(joined([*first, *restored]), _audio(spoken, []))


@pytest.mark.parametrize("name", ["random", "early", "spectrum", "overlapping", "f0"])
def test_a_saved_state_of_another_shape_is_rejected(name: str) -> None:
    vocoder = Vocoder(None, {})
    saved = vocoder.save(vocoder.open(seed=SEED, options={}))
    with pytest.raises(ValueError, match=f"{name} has the shape"):
        vocoder.restore({**saved, name: np.zeros((2, 2))}, seed=SEED, options={})


def test_the_saved_state_of_the_acoustic_model_is_its_speed() -> None:
    model = AcousticModel(None, {})
    state = model.open(seed=0, options={"speed": 1.5})
    assert model.restore(model.save(state), seed=0, options={}) == state


@pytest.mark.parametrize("frames", range(1, 8))
def test_the_shortest_sentences_are_complete(spoken: dict[str, Array], frames: int) -> None:
    short = {name: tensor[:frames].copy() for name, tensor in spoken.items()}
    short["boundary"][-1] = 1
    sound = _audio(short, [])
    assert len(sound) == frames * dsp.HOP
    np.testing.assert_array_equal(_audio(short, list(range(frames))), sound)


class _FrameMajorNoise:
    """A generator that returns noise in the order in which a stream needs it."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(SEED)

    def standard_normal(self, shape: tuple[int, int], dtype: type) -> Array:
        bins, doubled = shape
        noise = self._rng.standard_normal((doubled // 2, 2 * bins), dtype=dtype).view(np.complex64)
        return np.ascontiguousarray(noise.T).view(np.float32)


def test_streamed_audio_equals_that_of_the_whole_sentence(spoken: dict[str, Array]) -> None:
    rng, wholes = cast("np.random.Generator", _FrameMajorNoise()), []
    for sentence in SENTENCES:
        tensors = _speak(sentence).tensors
        spectrum, f0 = tensors["spectrum"].astype(np.float32), tensors["f0"].astype(np.float32)
        lh, theta, ln, lr, phi = (np.ascontiguousarray(spectrum[:, part].T) for part in range(5))
        wholes.append(dsp.synth(lh, theta, ln, lr, phi, f0, rng))
    np.testing.assert_allclose(_audio(spoken, [40, 80, 200]), np.concatenate(wholes), atol=1e-4)


def test_the_first_audio_follows_a_few_frames(spoken: dict[str, Array]) -> None:
    assert len(joined([*VocoderStream(SEED).push(_packet(spoken, slice(8)))])) >= 3 * dsp.HOP


def test_speed_shortens_the_frames() -> None:
    slow, fast = (len(_speak(SENTENCES[1], speed=speed).tensors["f0"]) for speed in (0.8, 1.6))
    assert slow > 1.5 * fast
