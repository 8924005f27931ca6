"""What a worker computes, recorded by torch's profiler."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

T = TypeVar("T")

STEP = "denoising step"


class ProfilerRecording:
    """From its making to its end, on the thread that made it."""

    def __init__(self, file: Path, *, max_steps: int | None) -> None:
        """`file` is a Chrome trace, compressed where it is called so; it is written at the end."""
        self._file, self._steps_left = file, max_steps
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile: Any = profile(activities=activities)
        self._profile.start()

    def step(self, work: Callable[[], T]) -> T:
        """Does a step, which is called STEP in the trace; the last one that was asked for ends the recording."""
        with record_function(STEP):
            done = work()
        if self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left <= 0:
                self.end()
        return done

    def end(self) -> None:
        """Writes the file. Ending twice is harmless."""
        recorded, self._profile = self._profile, None
        if recorded is not None:
            recorded.stop()
            recorded.export_chrome_trace(str(self._file))
