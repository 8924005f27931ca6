"""The function of the stage in TypeScript, in Python."""

from collections.abc import Mapping, Sequence

import numpy as np

from stagemesh.common.plugins.descriptors import Emitted, FunctionDescriptor, OptionSpec, Signature
from stagemesh.common.wire.tensors import TensorSpec, Value
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call

_TEXT = TensorSpec("uint8", ("bytes",))
UPPER = FunctionDescriptor(
    Signature(
        accepts={"text": _TEXT},
        emits={"text": Emitted(_TEXT, kind="text")},
        options={"times": OptionSpec(default=1, minimum=1, maximum=1000)},
    ),
    factory=f"{__name__}:Upper",
)


class Upper:
    """Converts each packet of text to upper case, and emits it `times` times."""

    def __init__(self, model: object, options: Mapping[str, object]) -> None:
        pass

    def open(self, *, seed: int, options: Mapping[str, Value]) -> int:
        return int(options["times"])

    def __call__(self, batch: Sequence[Call[int]]) -> Sequence[Sequence[Packet]]:
        return [[] if call.packet is None else [_converted(call.packet)] * call.state for call in batch]


def _converted(packet: Packet) -> Packet:
    upper = np.frombuffer(packet.tensors["text"].tobytes().upper(), np.uint8)
    return Packet({"text": upper}, packet.metadata)
