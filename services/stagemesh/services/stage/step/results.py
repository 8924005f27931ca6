"""Checks of what functions, transforms and engines make, before anything of it is sent."""

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from stagemesh.common.descriptors import Emitted, Signature
from stagemesh.common.errors import InternalError, InvalidChunkError
from stagemesh.common.stage_config import StageConfig
from stagemesh.common.tensors import Array, TensorSpec
from stagemesh.connectors.edge import Packet
from stagemesh.rpc.error_mapping import error_to_wire
from stagemesh.v1 import chunk_pb2

_MAX_KNOWN = 64


class ResultCheck:
    """Checks packets by the types that a descriptor declares.

    A check takes about a microsecond for each packet, because the types that were correct are remembered.
    """

    def __init__(
        self, declared: Mapping[str, TensorSpec], *, maker: str, metadata: Mapping[str, str], same_lengths: bool = True
    ) -> None:
        """`maker` is what makes the packets, for example "function upper". Errors contain `metadata`.

        If `same_lengths` is True, a symbol in the declared shapes is the same length in all tensors of a packet.
        """
        self.maker = maker
        self._declared, self._metadata = declared, metadata
        self._same_lengths = same_lengths
        self._known: set[tuple[object, ...]] = set()

    def check(self, packet: Packet) -> None:
        """Raises InternalError (INVALID_RESULT) if a tensor of a packet is not declared, or has another type."""
        # A list makes the tuple faster than a generator would.
        kinds = tuple([(name, tensor.dtype, tensor.shape) for name, tensor in packet.tensors.items()])
        if kinds in self._known:
            return
        lengths: dict[str, int] = {}
        for name, tensor in packet.tensors.items():
            try:
                self._check_tensor(name, tensor, lengths)
            except InvalidChunkError as exc:
                raise InternalError(
                    f"{self.maker} made a wrong result: {exc.message}; correct it, or the types in its descriptor",
                    reason="INVALID_RESULT",
                    metadata={**self._metadata, "tensor": str(name)},
                ) from None
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known.add(kinds)

    def _check_tensor(self, name: str, tensor: Array, lengths: dict[str, int]) -> None:
        spec = self._declared.get(name)
        if spec is None:
            names = ", ".join(self._declared) or "no tensor"
            raise InvalidChunkError(f"tensor {name!r} is not declared; declared: {names}")
        spec.check(name, tensor)
        if self._same_lengths:
            check_lengths(name, tensor, spec, lengths=lengths)


def check_lengths(name: str, tensor: Array, spec: TensorSpec, *, lengths: dict[str, int]) -> None:
    """Adds the lengths that the symbols of `spec` have in a tensor of a packet to `lengths`.

    Raises InvalidChunkError if a symbol has another length in another tensor of the packet.
    """
    for symbol, length in zip(spec.shape, tensor.shape, strict=True):
        if isinstance(symbol, str) and lengths.setdefault(symbol, length) != length:
            raise InvalidChunkError(
                f"tensor {name!r} has {length} {symbol}, but another tensor of its chunk has {lengths[symbol]}"
            )


def engine_result_check(config: StageConfig, signature: Signature) -> ResultCheck:
    """Returns the check of what a stage's engine makes."""
    maker = f"function {config.function}" if config.function else f"engine {config.engine}"
    return ResultCheck(
        {name: each.spec for name, each in signature.emits.items()},
        maker=f"{maker} of stage {config.stage}",
        metadata={"function": config.function} if config.function else {},
        same_lengths=False,
    )


class FiniteCheck:
    """Finds NaN and infinite values in the audio and in the images that a stage makes."""

    def __init__(self, emits: Mapping[str, Emitted], *, encoded: Sequence[str], maker: str, fails: bool) -> None:
        """`encoded` are the names of the tensors that are encoded as files. `maker` is what makes the packets.

        If `fails` is True, such a value raises an error. Otherwise, it adds a warning.
        """
        self._names = frozenset(chain(encoded, (name for name, each in emits.items() if each.kind == "audio")))
        self.checks = bool(self._names)
        """Whether `check` must be called for packets without values that the engine reports as not finite."""
        self._maker, self._fails = maker, fails
        self._found: dict[str, InternalError] = {}

    @property
    def warnings(self) -> list[chunk_pb2.Error]:
        """A warning for each tensor with such values."""
        return list(map(error_to_wire, self._found.values()))

    def check(self, packet: Packet, *, non_finite: Sequence[str] = ()) -> None:
        """Checks a packet. `non_finite` are the tensors that the engine has computed from non-finite values.

        Raises InternalError (NON_FINITE_RESULT) if the check fails and errors were requested.
        """
        for name in self._names:
            tensor = packet.tensors.get(name)
            if tensor is not None and tensor.dtype != np.uint8 and not np.isfinite(tensor).all():
                self._add(name)
        for name in non_finite:
            self._add(name)

    def _add(self, name: str) -> None:
        if name in self._found:
            return
        self._found[name] = error = InternalError(
            f"{self._maker} made NaN or infinite values of output {name!r}; the model computes wrongly, for example "
            "because the range of its dtype is too small",
            reason="NON_FINITE_RESULT",
            metadata={"tensor": name},
        )
        if self._fails:
            raise error
