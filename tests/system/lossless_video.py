"""Video files whose decoded frames are exactly the given ones."""

import io

import av
import numpy as np
import numpy.typing as npt

from stagemesh.client import VideoFile


def video_of(
    frames: npt.NDArray[np.uint8], *, rate_hz: int, sound: npt.NDArray[np.float32] | None = None, sound_hz: int = 16_000
) -> VideoFile:
    """Returns a video of `frames`, [frames, height, width, 3]. `sound`, [samples], belongs to the input if present."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        track = container.add_stream("pcm_f32le", rate=sound_hz, layout="mono") if sound is not None else None
        stream = container.add_stream("ffv1", rate=rate_hz)
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "bgr0"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
        if track is not None and sound is not None:
            audio = av.AudioFrame.from_ndarray(sound[np.newaxis], format="flt", layout="mono")
            audio.sample_rate = sound_hz
            container.mux(track.encode(audio))
            container.mux(track.encode(None))
    return VideoFile(file.getvalue(), "video/x-matroska", use_audio_in_video=sound is not None)
