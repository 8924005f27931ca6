"""The stage option `load`: how the model's weights are loaded, quantized and offloaded. This module does not import
torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import ConfigDict, JsonValue

QuantizationBackend = Literal["torchao", "bitsandbytes_4bit", "bitsandbytes_8bit", "quanto"]


@dataclass(frozen=True)
class QuantizationOptions:
    """Quantization of the transformer's weights by one of the libraries that diffusers supports.

    The library must be installed in addition to Stagemesh.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    backend: QuantizationBackend
    parameters: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """Arguments for diffusers' configuration class for the backend. For torchao, `quant_type` is the name of a class in
    torchao.quantization, such as Int8WeightOnlyConfig."""


@dataclass(frozen=True)
class LoadOptions:
    """Options for loading a pipeline's weights and for storing them while they are not in use."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    format: Literal["default", "dummy", "custom_pipeline"] = "default"
    """How the pipeline is loaded. `default` reads the model's files. `dummy` generates reproducible random weights, for
    speed tests. `custom_pipeline` runs the pipeline with the class that the option `custom_pipeline` names."""
    custom_pipeline: str | None = None
    """Class of a custom pipeline as "module:Class", or None for the built-in class. The class must be a subclass of
    `modular_pipeline.ModularStepPipeline` with the same constructor."""
    offload: Literal["none", "model", "group", "disk"] = "none"
    """Where weights are stored while they are not in use. `none`: on the device. `model`: in host memory, transferred
    to the device one model at a time (needs a GPU). `group`: in host memory, transferred to the device one group of
    layers at a time. `disk`: in files, read one group of layers at a time."""
    offload_by: Literal["leaf", "block"] = "leaf"
    """Size of the transformer's offload groups: a single layer (`leaf`) or a transformer block (`block`). Blocks are
    faster but use more device memory."""
    offload_dir: str | None = None
    """Folder in which each process creates its offload folder if `offload` is `disk`. None selects the system's
    temporary folder."""
    layerwise_casting: Literal["none", "float8_e4m3fn", "float8_e5m2"] = "none"
    """Data type in which the transformer's weights are stored. A layer's weights are converted to the computation's
    data type while the layer computes, which loses some precision. `none` disables the conversion."""
    quantization: QuantizationOptions | None = None
    compile: bool = False
    """Whether the transformer's blocks are compiled at the first step. Compilation changes the results by rounding
    errors."""

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
        """Whether the options modify the transformer's weights or keep some of them off the device."""
        return self.offload in {"group", "disk"} or self.layerwise_casting != "none" or self.quantization is not None
