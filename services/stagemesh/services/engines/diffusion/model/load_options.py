"""A stage's options about how weights are loaded and where they lie. Imports nothing of torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import ConfigDict, JsonValue

QuantizationBackend = Literal["torchao", "bitsandbytes_4bit", "bitsandbytes_8bit", "quanto"]


@dataclass(frozen=True)
class QuantizationOptions:
    """The transformer's weights in fewer bits, by one of the libraries that diffusers uses for that.

    Each has to be installed beside Stagemesh.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    backend: QuantizationBackend
    parameters: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """Of diffusers' class for the backend; torchao's `quant_type` is the name of a class of torchao.quantization, such
    as Int8WeightOnlyConfig."""


@dataclass(frozen=True)
class LoadOptions:
    """How a pipeline comes into memory."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    format: Literal["default", "dummy", "custom_pipeline"] = "default"
    """`dummy` makes random weights, the same each time, and reads none: for tests of speed. `custom_pipeline` has a
    class of one's own go through the phases."""
    custom_pipeline: str | None = None
    """That class, as "module:Class": made as `modular.ModularStepPipeline` is, of which it is a kind."""
    offload: Literal["none", "model", "group", "disk"] = "none"
    """Where weights lie that are not needed at the moment: on the device; in the host's memory, a model at a time
    (needs a GPU) or a group of layers at a time; on the disk, a group at a time."""
    offload_by: Literal["leaf", "block"] = "leaf"
    """The transformer's groups: a layer, or a block of layers. Fewer are faster, and larger."""
    offload_dir: str | None = None
    """The folder for `disk`, in which each process has one of its own; None for the system's temporary one."""
    layerwise_casting: Literal["none", "float8_e4m3fn", "float8_e5m2"] = "none"
    """What the transformer's weights are kept in; each layer's are cast for the time that it computes. Loses some
    precision."""
    quantization: QuantizationOptions | None = None
    compile: bool = False
    """Whether the transformer's blocks are compiled, at the first step. What they make differs in the last bits."""

    def __post_init__(self) -> None:
        if (self.format == "custom_pipeline") != (self.custom_pipeline is not None):
            raise ValueError("load.custom_pipeline names a class for load.format custom_pipeline, and for no other")
        if self.quantization is not None:
            for name, value in (("layerwise_casting", self.layerwise_casting), ("format", self.format)):
                if value not in {"none", "default"}:
                    raise ValueError(f"load.quantization stands beside load.{name} {value}; leave one of them out")
            if self.offload == "disk":
                raise ValueError("load.quantization stands beside load.offload disk; take group, or leave one out")

    @property
    def changes_weights(self) -> bool:
        """Whether the transformer's layers are others than what its folder holds, or lie elsewhere than on a device."""
        return self.offload in {"group", "disk"} or self.layerwise_casting != "none" or self.quantization is not None
