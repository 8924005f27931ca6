"""The synthetic reference voice of the golden values. Imports only numpy, because other environments use it, too."""

import numpy as np
import numpy.typing as npt

SAMPLE_RATE_HZ = 24_000


def synthesize_voice(seconds: float) -> npt.NDArray[np.float32]:
    """Returns syllables of a gliding tone with four overtones, float32[samples] at 24 kHz."""
    times = np.arange(round(seconds * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    phase = 2 * np.pi * (140 * times + 6 * np.sin(2 * np.pi * 0.9 * times))
    tones = [np.sin(order * phase + order**2) / order for order in range(1, 6)]
    loudness = 0.12 * (1.1 + np.sin(2 * np.pi * 3.1 * times) + 0.5 * np.sin(2 * np.pi * 7.3 * times))
    voice: npt.NDArray[np.float32] = (loudness * np.sum(tones, 0)).astype(np.float32)
    return voice
