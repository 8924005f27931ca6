"""The requests of the golden values, as the stage of the prompt receives them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from stagemesh.common.wire.tensors import Value
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call
from stagemesh.services.engines.options import request_options
from stagemesh.services.engines.prompts import Medium, Samples
from stagemesh.services.models.codec_speech import SAMPLE_RATE_HZ
from stagemesh.services.models.qwen3_tts import PROMPT
from stagemesh.services.models.qwen3_tts.prompt import PromptWriter
from tests.models.qwen3_tts import golden
from tests.models.qwen3_tts.voice import synthesize_voice

_OPTIONS = {
    "speaker": "speaker",
    "language": "language",
    "instruct": "instruction",
    "reference_text": "reference_text",
    "non_streaming": "whole_text",
}
"""The options of the stage by the names of the reference implementation."""


@dataclass(frozen=True, eq=False)
class Request:
    """A request, for example one of the golden values."""

    name: str
    text: str
    options: Mapping[str, Value] = field(default_factory=dict[str, Value])
    media: Sequence[Medium] = ()

    def value(self, name: str) -> npt.NDArray[Any]:
        return golden.arrays()[f"{self.name}/{name}"]

    @property
    def codes(self) -> list[list[int]]:
        codes: list[list[int]] = self.value("codes").tolist()
        return codes


def requests() -> list[Request]:
    return [
        Request(
            name,
            given["text"],
            {option: given[key] for key, option in _OPTIONS.items() if key in given},
            [Samples(synthesize_voice(given["reference"]), SAMPLE_RATE_HZ)] if "reference" in given else [],
        )
        for name, given in golden.requests().items()
    ]


def write_prompt(writer: PromptWriter, request: Request) -> Sequence[Packet]:
    """Returns the packets that the stage of the prompt emits for a request."""
    choice = writer.open(seed=0, options=request_options(request.options, PROMPT.signature.options, stage="prompt"))
    text = Packet({"text": np.frombuffer(request.text.encode(), np.uint8)})
    (packets,) = writer([Call(choice, text, request.media)])
    return packets


def talker_rows(packets: Sequence[Packet]) -> list[Packet]:
    """Returns the packets that reach the talker, as the edge selects them."""
    return [packet for packet in packets if "text_ids" in packet.tensors]
