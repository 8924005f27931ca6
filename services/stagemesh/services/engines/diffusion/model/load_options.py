"""The stage option `load`: how weights are loaded and where they are stored. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import ConfigDict, JsonValue

QuantizationBackend = Literal["torchao", "bitsandbytes_4bit", "bitsandbytes_8bit", "quanto"]


@dataclass(frozen=True)
class QuantizationOptions:
    """Quantizes the transformer's weights with one of the libraries that diffusers supports.

    The library must be installed in addition to Stagemesh.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    backend: QuantizationBackend
    parameters: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """Parameters of diffusers' configuration class for the backend. torchao's `quant_type` is the name of a class in
    torchao.quantization, such as Int8WeightOnlyConfig."""


@dataclass(frozen=True)
class LoadOptions:
    """Options for loading a pipeline into memory."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    format: Literal["default", "dummy", "custom_pipeline"] = "default"
    """How the pipeline is loaded. `default` reads the model's files. `dummy` generates reproducible random weights, for
    speed tests. `custom_pipeline` runs the phases with the class that the option `custom_pipeline` names."""
    custom_pipeline: str | None = None
    """A subclass of `modular_pipeline.ModularStepPipeline` with the same constructor, as "module:Class", or None."""
    offload: Literal["none", "model", "group", "disk"] = "none"
    """Where weights are stored while they are not used. `none`: on the device. `model`: in host memory, transferred one
    model at a time (needs a GPU). `group`: in host memory, transferred one group of layers at a time. `disk`: in files,
    read one group of layers at a time."""
    offload_by: Literal["leaf", "block"] = "leaf"
    """Size of the transformer's offload groups: a layer or a block of layers. Blocks are faster but use more memory."""
    offload_dir: str | None = None
    """Parent folder for the offload folder of each process, for `disk`. None means the system's temporary folder."""
    layerwise_casting: Literal["none", "float8_e4m3fn", "float8_e5m2"] = "none"
    """Data type in which the transformer's weights are stored. Each layer's weights are cast to the computation's data
    type while the layer computes. Loses some precision."""
    quantization: QuantizationOptions | None = None
    compile: bool = False
    """Whether the transformer's blocks are compiled at the first step. The results differ in the last bits."""

    def __post_init__(self) -> None:
        if (self.format == "custom_pipeline") != (self.custom_pipeline is not None):
            raise ValueError("set load.custom_pipeline if, and only if, load.format is custom_pipeline")
        if self.quantization is not None:
            for name, value in (("layerwise_casting", self.layerwise_casting), ("format", self.format)):
                if value not in {"none", "default"}:
                    raise ValueError(f"load.quantization excludes load.{name} {value}; omit one of them")
            if self.offload == "disk":
                raise ValueError("load.quantization excludes load.offload disk; set group, or omit one of them")

    @property
    def changes_weights(self) -> bool:
        """Whether the transformer's weights are modified when loaded, or are not on the device all the time."""
        return self.offload in {"group", "disk"} or self.layerwise_casting != "none" or self.quantization is not None
