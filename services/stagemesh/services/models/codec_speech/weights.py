"""The weights of one model, from which its parts take theirs while they are built."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stagemesh.common.errors import NotReadyError
from stagemesh.services.models.checkpoint import check_names, list_names


@dataclass
class _Taken:
    """The names of the weights that have been taken, and the descriptions of the weights that have a wrong shape."""

    names: set[str] = field(default_factory=set[str])
    wrong_shapes: list[str] = field(default_factory=list[str])


class Weights:
    """The weights whose names start with a prefix.

    Building a model takes each of its weights once. `check` then reports all weights that are missing, unknown or of
    another shape.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        device: torch.device,
        dtype: torch.dtype,
        prefix: str = "",
        taken: _Taken | None = None,
    ) -> None:
        self._tensors, self._prefix = tensors, prefix
        self._device, self._dtype = device, dtype
        self._taken = taken if taken is not None else _Taken()

    def part(self, name: str | int) -> "Weights":
        """Returns the weights of the model's part `name`."""
        prefix = f"{self._prefix}{name}."
        return Weights(self._tensors, device=self._device, dtype=self._dtype, prefix=prefix, taken=self._taken)

    def take(self, name: str, *shape: int) -> Tensor:
        """Returns a weight as float32 on the model's device. A missing weight, or one of another shape, is zero."""
        name = self._prefix + name
        self._taken.names.add(name)
        tensor = self._tensors.get(name)
        if tensor is not None and tensor.shape != shape:
            self._taken.wrong_shapes.append(f"{name} has {list(tensor.shape)} instead of {list(shape)}")
            tensor = None
        if tensor is None:
            return torch.zeros(shape, device=self._device)
        return tensor.to(self._device, torch.float32)

    def place(self, tensor: Tensor) -> Tensor:
        """Returns a tensor in the data type in which the model computes."""
        return tensor.to(self._dtype).contiguous()

    def check(self, what: str) -> None:
        """Raises NotReadyError (LOAD_FAILED) if weights are missing, unknown or of another shape. Lists their names.

        `what` names the model and its checkpoint in the message.
        """
        check_names(self._taken.names, self._tensors.keys(), what)
        if self._taken.wrong_shapes:
            raise NotReadyError(
                f"the weights of {what} do not fit its config: {list_names(self._taken.wrong_shapes)}",
                reason="LOAD_FAILED",
            )
