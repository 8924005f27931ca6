"""Functions that return the hidden states that they get. One of them waits until a test releases it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from stagemesh.common.plugins.descriptors import Emitted, FunctionDescriptor, OptionSpec, Signature
from stagemesh.common.wire.tensors import TensorSpec, Value
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call
from tests.system.added_transforms import add_package

_ROWS = TensorSpec("float32", ("tokens", "hidden"))
_NUMBERS = TensorSpec("int64", ("numbers",))
_EMITS = {"rows": Emitted(_ROWS), "place": Emitted(_NUMBERS)}
_ENTRY_POINTS = """\
[stagemesh.functions]
taken = tests.system.state_consumers:TAKEN
held = tests.system.state_consumers:HELD
"""


class Taken:
    """Emits the rows of each packet, and as `place` the position of the first row and the number of rows."""

    def __init__(self, model: object, options: Mapping[str, object]) -> None:
        self._gate = options.get("gate")

    def open(self, *, seed: int, options: Mapping[str, Value]) -> bool:
        return bool(options.get("hold"))

    def __call__(self, batch: Sequence[Call[bool]]) -> Sequence[Sequence[Packet]]:
        if self._gate is not None and any(call.state for call in batch):
            # Opening a named pipe waits until its other end is opened.
            Path(str(self._gate)).read_bytes()
        return [[] if call.packet is None else [_placed(call.packet)] for call in batch]


def _placed(packet: Packet) -> Packet:
    rows, start = packet.tensors["hidden_states"], packet.metadata["token_start"]
    return Packet({"rows": rows, "place": np.array([start, len(rows)], np.int64)})


TAKEN = FunctionDescriptor(Signature(accepts={"hidden_states": _ROWS}, emits=_EMITS), factory=f"{__name__}:Taken")
HELD = FunctionDescriptor(
    Signature(
        accepts={"hidden_states": _ROWS},
        emits=_EMITS,
        options={"hold": OptionSpec(default=0.0, minimum=0.0, maximum=1.0)},
    ),
    factory=f"{__name__}:Taken",
)


def add_functions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the functions "taken" and "held" for every process that starts afterwards."""
    root = Path(__file__).parents[2]
    add_package(folder, monkeypatch, root, name="state_consumers", entry_points=_ENTRY_POINTS)
