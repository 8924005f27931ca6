"""Video files whose decoded frames are exactly the given ones."""

import io

import av
import numpy as np
import numpy.typing as npt

from stagemesh.client import VideoFile


def video_of(frames: npt.NDArray[np.uint8], *, rate_hz: int) -> VideoFile:
    """Returns a video of `frames`, [frames, height, width, 3]."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=rate_hz)
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "bgr0"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return VideoFile(file.getvalue(), "video/x-matroska")
