"""The weights of one model, from which its parts take theirs while they are built."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from stagemesh.common.errors import NotReadyError
from stagemesh.services.models.checkpoint import check_names, list_names


@dataclass(frozen=True)
class Weights:
    """The weights whose names start with a prefix.

    Building a model takes each of its weights once. `check` then reports all weights that are missing, unknown or of
    another shape.
    """

    tensors: Mapping[str, Tensor]
    device: torch.device
    dtype: torch.dtype
    """The data type in which the model computes."""
    prefix: str = ""
    taken: set[str] = field(default_factory=set[str])
    """The names of the weights that have been taken. All parts of the model share the set, and `wrong_shapes`."""
    wrong_shapes: list[str] = field(default_factory=list[str])

    def part(self, name: str | int) -> "Weights":
        """Returns the weights of the model's part `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def take(self, name: str, *shape: int) -> Tensor:
        """Returns a weight as float32 on the model's device. A missing weight, or one of another shape, is zero."""
        name = self.prefix + name
        self.taken.add(name)
        tensor = self.tensors.get(name)
        if tensor is not None and tensor.shape != shape:
            self.wrong_shapes.append(f"{name} has {list(tensor.shape)} instead of {list(shape)}")
            tensor = None
        if tensor is None:
            return torch.zeros(shape, device=self.device)
        return tensor.to(self.device, torch.float32)

    def place(self, tensor: Tensor) -> Tensor:
        """Returns a tensor in the data type in which the model computes."""
        return tensor.to(self.dtype).contiguous()

    def place_linear(self, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
        """Returns the weight and the bias of a linear layer, in the data type of the computation."""
        return self.place(self.take("weight", outputs, inputs)), self.place(self.take("bias", outputs))

    def check(self, what: str) -> None:
        """Raises NotReadyError (LOAD_FAILED) if weights are missing, unknown or of another shape. Lists their names.

        `what` names the model and its checkpoint in the message.
        """
        check_names(self.taken, self.tensors.keys(), what)
        if self.wrong_shapes:
            raise NotReadyError(
                f"the weights of {what} do not fit its config: {list_names(self.wrong_shapes)}", reason="LOAD_FAILED"
            )
