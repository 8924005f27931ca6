"""Records when chunks leave the talker and when the vocoder is called with them, and likewise for the thinker's tokens.

The stages of the measured pipeline are the shipped ones with this module around them. `register` makes their names
known to all processes that are started afterwards. Each process appends the stamps of a request to a file of its own
when the request ends there. A stamp costs less than a microsecond and is of CLOCK_MONOTONIC, which all processes of a
host share. So the stages of several processes are comparable, and nothing is sent or written while a request runs.
"""

import json
import os
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import JsonValue, TypeAdapter

from stagemesh.common.plugins.descriptors import FunctionDescriptor, Signature
from stagemesh.services.engines.vllm import DESCRIPTOR as VLLM
from stagemesh.services.models.qwen3_omni import CODE2WAV

FRAME_S = 0.08
"""The duration of the audio of one frame of a real codec, which has 12.5 frames a second."""
SAMPLES_PER_FRAME = 48
"""The samples of one frame of the tiny model. At the model's 24 kHz they would last 2 ms."""
FOLDER = "stamps"
"""The stage option with the folder for the stamps."""
_ENTRY_POINTS = f"""\
[stagemesh.engines]
stamped_vllm = {__name__}:ENGINE
[stagemesh.functions]
stamped_code2wav = {__name__}:VOCODER
"""


@dataclass
class Stamps:
    """The times at which the rows of one request passed a place."""

    place: str
    """Where the rows passed: "STAGE out" for the rows of the engine's emissions, "STAGE in" for its inputs, and "STAGE
    chunks" for the chunks into which its emissions are cut.
    """
    seed: int
    """The seed of the request, which identifies it."""
    rows: list[int] = field(default_factory=list[int])
    """The number of rows that had passed at each time."""
    times_ns: list[int] = field(default_factory=list[int])

    def add(self, rows: int) -> None:
        """Records that `rows` more rows pass now."""
        self.times_ns.append(time.monotonic_ns())
        self.rows.append(rows + (self.rows[-1] if self.rows else 0))

    def save(self, folder: Path) -> None:
        """Appends the stamps to the file of this process in `folder`."""
        with (folder / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(asdict(self)) + "\n")

    def time_ns(self, row: int) -> int | None:
        """Returns the time at which the number of rows reached `row`, or None if it never did."""
        index = bisect_left(self.rows, row)
        return self.times_ns[index] if index < len(self.rows) else None


_STAMPS = TypeAdapter(Stamps)


def read(folder: Path) -> dict[str, dict[int, Stamps]]:
    """Returns the stamps in the files of `folder`, by place and seed."""
    found: dict[str, dict[int, Stamps]] = {}
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            stamps = _STAMPS.validate_json(line)
            found.setdefault(stamps.place, {})[stamps.seed] = stamps
    return found


def vocoder_hops_ms(stamps: Mapping[str, Mapping[int, Stamps]], seeds: Sequence[int]) -> list[float]:
    """Returns the time from the emission that completes each chunk to the vocoder's call with it, in ms, sorted.

    Under `ramp: auto`, a chunk may be completed by a later frame than its last one, because it waited for a larger
    size. The last chunk of a request is left out, because the end of the talker completes it.
    """
    calls, chunks, frames = stamps["code2wav in"], stamps["talker chunks"], stamps["talker out"]
    hops_ms: list[float] = []
    for seed in seeds:
        for row, called_ns in list(zip(calls[seed].rows, calls[seed].times_ns, strict=True))[:-1]:
            cut_ns = chunks[seed].time_ns(row)
            assert cut_ns is not None, "the vocoder is called with chunks that the talker has cut"
            # The chunk is cut in the same step of the event loop as the emission, which comes first.
            emitted_ns = frames[seed].times_ns[bisect_right(frames[seed].times_ns, cut_ns) - 1]
            hops_ms.append(_ms(emitted_ns, called_ns))
    return sorted(hops_ms)


def token_hops_ms(stamps: Mapping[str, Mapping[int, Stamps]], seeds: Sequence[int]) -> list[float]:
    """Returns the time from the thinker's emission of each token until the talker reads its row, in ms, sorted.

    The talker's row of a token is written when the next token shows that it does not end the answer. The first token's
    row belongs to the talker's prompt and is left out, as is the row of the end marker.
    """
    return sorted(
        _ms(emitted_ns, arrived_ns)
        for seed in seeds
        for row, arrived_ns in _answer_rows(stamps["talker in"][seed])
        if (emitted_ns := stamps["thinker out"][seed].time_ns(row + 2)) is not None
    )


def _answer_rows(arrived: Stamps) -> Iterator[tuple[int, int]]:
    """Yields how many rows of the answer had arrived after the prompt's rows, and when."""
    return ((row, arrived_ns) for row, arrived_ns in zip(arrived.rows, arrived.times_ns, strict=True) if row > 0)


def _ms(first_ns: int, last_ns: int) -> float:
    return (last_ns - first_ns) / 1e6


def register(folder: Path) -> None:
    """Makes the stamped engine and function known to this process and to all processes that it starts."""
    package = folder / "stamped-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: stamped\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(_ENTRY_POINTS)
    root = Path(__file__).parents[2]
    sys.path.insert(0, str(folder))
    paths = [str(folder), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def without_folder(options: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Returns the options of the stage that is stamped."""
    return {name: value for name, value in options.items() if name != FOLDER}


def _signature(function: str | None, options: Mapping[str, JsonValue]) -> Signature:
    return VLLM.signature(function, without_folder(options))


ENGINE = replace(VLLM, factory="benchmarks.omni_streams.stamped_stages:StampedVllm", signature=_signature)
_AUDIO = replace(CODE2WAV.signature.emits["audio"], sample_rate_hz=round(SAMPLES_PER_FRAME / FRAME_S))
VOCODER = FunctionDescriptor(
    replace(CODE2WAV.signature, emits={"audio": _AUDIO}),
    factory="benchmarks.omni_streams.stamped_stages:StampedVocoder",
)
"""Its sample rate is such that a frame lasts as long as one of a real codec."""
