"""Causal decoders of codec frames to audio, in a streaming form.

A stream is decoded in chunks. Each part of a decoder retains the last inputs that its next outputs depend on: a
convolution the inputs under its kernel, attention the keys and values in its window. Every division of a stream into
chunks therefore gives the samples of one whole decode, apart from rounding, and each frame is computed once.

The parts compute the same functions as the modules of transformers' Qwen3OmniMoeCode2Wav, and their weights have the
same names. Constant factors are multiplied into the weights, so that a chunk needs few operations.

In shapes, `rows` is the number of streams in a batch, and `steps` is the number of new time steps of a part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own convention

from stagemesh.services.models.codec_speech.weights import Weights

_DILATIONS = (1, 3, 9)
_SMALL_ELEMENTS = 20_480
"""The maximum number of input elements of a convolution that a CPU computes as a matrix product.

For such inputs, torch's own convolutions take up to four times as long. Above this number, torch uses oneDNN.
"""


@dataclass
class StreamState:
    """The state of one stream between two chunks."""

    frames: int = 0
    """The number of frames that have been decoded."""
    memory: Tensor | None = None
    """The inputs that all parts of the decoder retain, as one tensor [elements]. None before the first frames."""


class BatchState:
    """The states of streams that are decoded together. All of them are at their first frames, or none is.

    The parts of a decoder call `join` in the same order for each chunk. The decoder then calls `advance`. The streams'
    own objects change only in `commit`.
    """

    def __init__(self, states: Sequence[StreamState]) -> None:
        self._states = states
        self.frames = [state.frames for state in states]
        memories = [state.memory for state in states if state.memory is not None]
        assert len(memories) in {0, len(states)}, "streams at their first frames need a batch of their own"
        self._past: Tensor | None = None
        if memories:
            self._past = memories[0].unsqueeze(0) if len(memories) == 1 else torch.stack(memories)
        self._next: list[Tensor] = []
        self._read = 0

    @property
    def is_first(self) -> bool:
        """Whether the streams are at their first frames."""
        return self._past is None

    def join(self, new: Tensor, length: int, *, dim: int) -> Tensor:
        """Returns a part's retained inputs, followed by its new inputs along `dim`. Retains the last `length` inputs.

        Before the first frames of a stream, the inputs are zero.
        """
        if not length:
            return new
        shape = list(new.shape)
        shape[dim] = length
        if self._past is None:
            past = new.new_zeros(shape)
        else:
            size = prod(shape[1:])
            past = self._past[:, self._read : self._read + size].view(shape)
            self._read += size
        joined = torch.cat((past, new), dim)
        self._next.append(joined.narrow(dim, joined.shape[dim] - length, length).flatten(1))
        return joined

    def advance(self, frames: int) -> None:
        """Ends a chunk of `frames` frames."""
        self._past = torch.cat(self._next, 1)
        self._next, self._read = [], 0
        self.frames = [done + frames for done in self.frames]

    def commit(self) -> None:
        """Stores the present state of each stream in the stream's own object."""
        assert self._past is not None, "no chunk has been decoded"
        for row, (state, frames) in enumerate(zip(self._states, self.frames, strict=True)):
            # A row that is a view would retain the whole batch.
            state.memory = self._past[row].clone() if len(self._past) > 1 else self._past[row]
            state.frames = frames


class CausalConv:
    """A convolution whose outputs depend only on the present and on earlier inputs.

    If `depthwise` is set, each channel is convolved by itself. `inputs` and `outputs` are then equal.
    """

    def __init__(
        self, weights: Weights, inputs: int, outputs: int, *, kernel: int, dilation: int = 1, depthwise: bool = False
    ) -> None:
        weights = weights.part("conv")
        self._groups = inputs if depthwise else 1
        self._weight = weights.place(weights.take("weight", outputs, inputs // self._groups, kernel))
        self._bias = weights.place(weights.take("bias", outputs))
        self._dilation = dilation
        self._history = (kernel - 1) * dilation

    def __call__(self, hidden: Tensor, batch: BatchState) -> Tensor:
        """Converts [rows, inputs, steps] to [rows, outputs, steps]."""
        joined = batch.join(hidden, self._history, dim=2)
        if not joined.is_cpu or joined.numel() > _SMALL_ELEMENTS:
            return F.conv1d(joined, self._weight, self._bias, dilation=self._dilation, groups=self._groups)
        return self._multiply_windows(joined) if self._groups == 1 else self._add_taps(joined)

    def _multiply_windows(self, joined: Tensor) -> Tensor:
        """Returns the outputs as the product of the weights and of the inputs under the kernel at each step."""
        windows = joined.unfold(2, self._history + 1, 1)[..., :: self._dilation]
        weight = self._weight.flatten(1).expand(len(joined), -1, -1)
        return torch.baddbmm(self._bias[:, None], weight, windows.transpose(2, 3).flatten(1, 2))

    def _add_taps(self, joined: Tensor) -> Tensor:
        """Returns the outputs of a depthwise convolution without dilation, as a sum over the taps of the kernel."""
        steps = joined.shape[2] - self._history
        outputs = torch.addcmul(self._bias[:, None], joined[..., :steps], self._weight[..., 0])
        for tap in range(1, self._weight.shape[2]):
            outputs.addcmul_(joined[..., tap : tap + steps], self._weight[..., tap])
        return outputs


class CausalTransposedConv:
    """A transposed convolution that increases the number of steps by the factor `stride`.

    `kernel` is at least `stride` and at most twice as large. If it is larger than `stride`, successive inputs overlap
    in the outputs, and the last `kernel - stride` outputs follow with the next chunk. A stream lacks its first
    `kernel - stride` outputs if `cut_start` is set.
    """

    def __init__(
        self, weights: Weights, inputs: int, outputs: int, *, kernel: int, stride: int, cut_start: bool = True
    ) -> None:
        weights = weights.part("conv")
        self._weight = weights.place(weights.take("weight", inputs, outputs, kernel))
        if self._weight.is_cpu:
            # [outputs, kernel, inputs], the order that `_multiply` needs.
            self._weight = self._weight.permute(1, 2, 0).contiguous()
        self._bias = weights.place(weights.take("bias", outputs))
        self._stride, self._history = stride, 1 if kernel > stride else 0
        self._missing = kernel - stride if cut_start else 0

    def __call__(self, hidden: Tensor, batch: BatchState) -> Tensor:
        """Converts [rows, inputs, steps] to [rows, outputs, steps * stride], or less for the first chunk."""
        joined = batch.join(hidden, self._history, dim=2)
        if joined.is_cpu:
            outputs = self._multiply(joined)
        else:
            outputs = F.conv_transpose1d(joined, self._weight, self._bias, stride=self._stride)
        start = self._history * self._stride + (self._missing if batch.is_first else 0)
        return outputs[..., start : joined.shape[2] * self._stride]

    def _multiply(self, joined: Tensor) -> Tensor:
        """Returns the outputs as a matrix product whose overlapping parts are added.

        On a CPU, torch's own transposed convolution takes up to 2.5 times as long.
        """
        outputs, kernel, _ = self._weight.shape
        products = torch.matmul(self._weight.flatten(0, 1), joined).view(len(joined), outputs, kernel, joined.shape[2])
        sums, overlap = products[:, :, : self._stride], products[:, :, self._stride :]
        if self._history:
            sums[:, :, : overlap.shape[2], 1:] += overlap[..., :-1]
        return sums.transpose(2, 3).flatten(2).add_(self._bias[:, None])


class Snake:
    """The activation x + sin(a x)^2 / b, with a and b for each channel."""

    _NO_DIVISION_BY_ZERO = 1e-9

    def __init__(self, weights: Weights, channels: int) -> None:
        self._frequency = weights.place(weights.take("alpha", channels).exp()[:, None])
        amplitude = 1.0 / (weights.take("beta", channels).exp() + self._NO_DIVISION_BY_ZERO)
        self._amplitude = weights.place(amplitude[:, None])

    def __call__(self, hidden: Tensor) -> Tensor:
        """Converts [rows, channels, steps]."""
        return torch.addcmul(hidden, (hidden * self._frequency).sin_().square_(), self._amplitude)


class ConvNeXt:
    """A residual block: a convolution of each channel by itself, followed by two linear layers for each step."""

    KERNEL = 7
    _EPSILON = 1e-6

    def __init__(self, weights: Weights, channels: int) -> None:
        self._conv = CausalConv(weights.part("dwconv"), channels, channels, kernel=self.KERNEL, depthwise=True)
        norm, up, down = weights.part("norm"), weights.part("pwconv1"), weights.part("pwconv2")
        self._norm = weights.place(norm.take("weight", channels)), weights.place(norm.take("bias", channels))
        self._up = up.place_linear(channels, 4 * channels)
        scale = weights.take("gamma", channels)
        self._down = (
            weights.place(scale[:, None] * down.take("weight", channels, 4 * channels)),
            weights.place(scale * down.take("bias", channels)),
        )

    def __call__(self, hidden: Tensor, batch: BatchState) -> Tensor:
        """Converts [rows, channels, steps]."""
        steps_first = self._conv(hidden, batch).transpose(1, 2)
        normed = F.layer_norm(steps_first, steps_first.shape[-1:], *self._norm, eps=self._EPSILON)
        mixed = F.linear(F.gelu(F.linear(normed, *self._up)), *self._down)
        return hidden + mixed.transpose(1, 2)


class ResidualUnit:
    """A residual block of a decoder: a dilated convolution, and a convolution of single steps."""

    KERNEL = 7

    def __init__(self, weights: Weights, channels: int, *, dilation: int) -> None:
        self._first_snake = Snake(weights.part("act1"), channels)
        self._dilated = CausalConv(weights.part("conv1"), channels, channels, kernel=self.KERNEL, dilation=dilation)
        self._second_snake = Snake(weights.part("act2"), channels)
        self._mix = CausalConv(weights.part("conv2"), channels, channels, kernel=1)

    def __call__(self, hidden: Tensor, batch: BatchState) -> Tensor:
        """Converts [rows, channels, steps]."""
        mixed = self._dilated(self._first_snake(hidden), batch)
        return self._mix(self._second_snake(mixed), batch).add_(hidden)


class DecoderBlock:
    """Increases the number of steps by the factor `stride`, then applies residual units."""

    def __init__(self, weights: Weights, inputs: int, outputs: int, *, stride: int, cut_start: bool) -> None:
        parts = weights.part("block")
        self._snake = Snake(parts.part(0), inputs)
        self._upsample = CausalTransposedConv(
            parts.part(1), inputs, outputs, kernel=2 * stride, stride=stride, cut_start=cut_start
        )
        self._units = [
            ResidualUnit(parts.part(number), outputs, dilation=dilation)
            for number, dilation in enumerate(_DILATIONS, start=2)
        ]

    def __call__(self, hidden: Tensor, batch: BatchState) -> Tensor:
        """Converts [rows, inputs, steps] to [rows, outputs, steps * stride].

        The first chunk has `stride` outputs less if `cut_start` is set.
        """
        hidden = self._upsample(self._snake(hidden), batch)
        for unit in self._units:
            hidden = unit(hidden, batch)
        return hidden


@dataclass(frozen=True)
class RotaryConfig:
    """The parameters of the rotary position embedding in a config of transformers."""

    rope_theta: PositiveFloat = 10_000.0
    rope_type: Literal["default"] = "default"


@dataclass(frozen=True)
class DecoderConfig:
    """The config of a decoder of codec frames. It has the names and defaults of transformers and qwen-tts."""

    hidden_size: PositiveInt = 1024
    intermediate_size: PositiveInt = 3072
    num_hidden_layers: PositiveInt = 8
    num_attention_heads: PositiveInt = 16
    num_key_value_heads: PositiveInt = 16
    head_dim: PositiveInt | None = None
    sliding_window: Annotated[int, Field(ge=2)] = 72
    rms_norm_eps: PositiveFloat = 1e-5
    attention_bias: bool = False
    hidden_act: Literal["silu"] = "silu"
    rope_theta: PositiveFloat | None = None
    rope_parameters: RotaryConfig | None = None
    codebook_size: PositiveInt = 2048
    num_quantizers: PositiveInt = 16
    decoder_dim: PositiveInt = 1536
    upsample_rates: tuple[PositiveInt, ...] = (8, 5, 4, 3)
    upsampling_ratios: tuple[PositiveInt, ...] = (2, 2)

    @property
    def head_size(self) -> int:
        """The number of elements of a query, a key or a value."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_base(self) -> float:
        """The base of the rotary embedding's wavelengths. Older versions of transformers store it as `rope_theta`."""
        return self.rope_theta or (self.rope_parameters or RotaryConfig()).rope_theta


class WaveDecoder:
    """Converts hidden states of codec frames to samples.

    The parts `upsample` and `decoder` of the weights belong to it. `inputs` is the width of the hidden states. The
    number of channels halves with each factor in `upsample_rates`. If `cut_start` is set, a stream lacks the outputs
    that only its first inputs affect, for each factor.
    """

    _KERNEL = 7

    def __init__(self, weights: Weights, config: DecoderConfig, *, inputs: int, cut_start: bool = True) -> None:
        ratios, rates, channels = config.upsampling_ratios, config.upsample_rates, config.decoder_dim
        upsample, decoder = weights.part("upsample"), weights.part("decoder")
        self._upsample = [
            (
                CausalTransposedConv(upsample.part(number).part(0), inputs, inputs, kernel=ratio, stride=ratio),
                ConvNeXt(upsample.part(number).part(1), inputs),
            )
            for number, ratio in enumerate(ratios)
        ]
        self._first = CausalConv(decoder.part(0), inputs, channels, kernel=self._KERNEL)
        self._blocks = [
            DecoderBlock(
                decoder.part(number + 1),
                channels // 2**number,
                channels // 2 ** (number + 1),
                stride=rate,
                cut_start=cut_start,
            )
            for number, rate in enumerate(rates)
        ]
        self.reach = self._reach(ratios, rates)
        """The number of last frames on which the retained inputs of all parts depend."""
        channels //= 2 ** len(rates)
        self._snake = Snake(decoder.part(len(rates) + 1), channels)
        self._last = CausalConv(decoder.part(len(rates) + 2), channels, 1, kernel=self._KERNEL)

    def __call__(self, hidden: Tensor, batch: BatchState) -> Tensor:
        """Converts [rows, frames, inputs] to samples from -1 to 1, as float32[rows, samples]."""
        hidden = hidden.transpose(1, 2)
        for transposed, mixing in self._upsample:
            hidden = mixing(transposed(hidden, batch), batch)
        hidden = self._first(hidden, batch)
        for block in self._blocks:
            hidden = block(hidden, batch)
        return self._last(self._snake(hidden), batch).squeeze(1).float().clamp_(-1, 1)

    def _reach(self, ratios: Sequence[int], rates: Sequence[int]) -> int:
        # From the last part to the first one: the number of last inputs on which all later parts depend.
        steps = self._KERNEL - 1
        for rate in reversed(rates):
            steps += sum((ResidualUnit.KERNEL - 1) * dilation for dilation in _DILATIONS)
            steps = ceil(steps / rate) + 1
        steps += self._KERNEL - 1
        for ratio in reversed(ratios):
            steps = ceil((steps + ConvNeXt.KERNEL - 1) / ratio)
        return steps


class WindowTransformer:
    """A transformer in which a position attends to itself and to the `sliding_window - 1` positions before it."""

    def __init__(self, weights: Weights, config: DecoderConfig) -> None:
        self._history = config.sliding_window - 1
        self.reach = config.num_hidden_layers * self._history
        """The number of earlier positions on which the hidden state of a position depends."""
        layers = weights.part("layers")
        self._layers = [WindowLayer(layers.part(number), config) for number in range(config.num_hidden_layers)]
        self._norm = weights.place(weights.take("norm.weight", config.hidden_size))
        self._epsilon = config.rms_norm_eps
        exponents = torch.arange(0, config.head_size, 2, device=self._norm.device) / config.head_size
        self._frequencies = config.rotary_base**-exponents

    def __call__(self, hidden: Tensor, batch: BatchState) -> Tensor:
        """Converts [rows, steps, hidden_size]."""
        starts = torch.tensor(batch.frames, device=hidden.device)[:, None]
        steps = torch.arange(hidden.shape[1], device=hidden.device)
        angles = (starts + steps)[:, :, None, None] * self._frequencies
        rotation = torch.polar(torch.ones_like(angles), angles)
        mask = self._mask(starts, steps, hidden.dtype)
        for layer in self._layers:
            hidden = layer(hidden, batch, rotation=rotation, mask=mask)
        return F.rms_norm(hidden, hidden.shape[-1:], self._norm, self._epsilon)

    def _mask(self, starts: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the attention mask [rows, 1, steps, keys]: 0 for a key in the window, and -inf for another key."""
        keys = torch.arange(self._history + len(steps), device=steps.device)
        age = steps[:, None] + self._history - keys
        # The memory of a stream that is shorter than the window contains keys of positions before its start.
        seen = (age >= 0) & (age <= self._history) & (keys >= self._history - starts)[:, None]
        return torch.zeros((), dtype=dtype, device=steps.device).where(seen, float("-inf"))[:, None]


class WindowLayer:
    """One layer of a `WindowTransformer`."""

    def __init__(self, weights: Weights, config: DecoderConfig) -> None:
        self._heads, self._key_heads = config.num_attention_heads, config.num_key_value_heads
        self._head_size, self._history = config.head_size, config.sliding_window - 1
        self._epsilon = config.rms_norm_eps
        width, inner = config.hidden_size, config.intermediate_size
        self._attention_norm = weights.place(weights.take("input_layernorm.weight", width))
        self._mlp_norm = weights.place(weights.take("post_attention_layernorm.weight", width))
        attention = weights.part("self_attn")
        self._project = weights.place(self._joint(attention, "weight", width))
        self._project_bias = weights.place(self._joint(attention, "bias")) if config.attention_bias else None
        scale = weights.take("self_attn_layer_scale.scale", width)
        self._output = weights.place(
            scale[:, None] * attention.take("o_proj.weight", width, self._heads * self._head_size)
        )
        self._output_bias = (
            weights.place(scale * attention.take("o_proj.bias", width)) if config.attention_bias else None
        )
        mlp, scale = weights.part("mlp"), weights.take("mlp_layer_scale.scale", width)
        gate_and_up = [mlp.take(f"{name}_proj.weight", inner, width) for name in ("gate", "up")]
        self._gate_and_up = weights.place(torch.cat(gate_and_up))
        self._down = weights.place(scale[:, None] * mlp.take("down_proj.weight", width, inner))

    def _joint(self, weights: Weights, name: str, *inputs: int) -> Tensor:
        """Returns the weights or biases of queries, keys and values as one tensor.

        The elements of queries and keys are reordered, so that the pairs that are rotated together are adjacent. Their
        products do not depend on the order.
        """
        size = self._head_size
        parts: list[Tensor] = []
        for kind, heads in (("q", self._heads), ("k", self._key_heads), ("v", self._key_heads)):
            part = weights.take(f"{kind}_proj.{name}", heads * size, *inputs)
            if kind != "v":
                part = part.view(heads, 2, size // 2, *inputs).transpose(1, 2).flatten(0, 2)
            parts.append(part)
        return torch.cat(parts)

    def __call__(self, hidden: Tensor, batch: BatchState, *, rotation: Tensor, mask: Tensor) -> Tensor:
        """Converts [rows, steps, hidden_size]. `rotation` is complex64[rows, steps, 1, head size / 2]."""
        hidden = hidden + self._attend(hidden, batch, rotation=rotation, mask=mask)
        normed = F.rms_norm(hidden, hidden.shape[-1:], self._mlp_norm, self._epsilon)
        gate, up = F.linear(normed, self._gate_and_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate).mul_(up), self._down)

    def _attend(self, hidden: Tensor, batch: BatchState, *, rotation: Tensor, mask: Tensor) -> Tensor:
        normed = F.rms_norm(hidden, hidden.shape[-1:], self._attention_norm, self._epsilon)
        projected = F.linear(normed, self._project, self._project_bias).view(*hidden.shape[:2], -1, self._head_size)
        turned = _rotate(projected[:, :, : self._heads + self._key_heads], rotation)
        keys = batch.join(turned[:, :, self._heads :], self._history, dim=1)
        values = batch.join(projected[:, :, self._heads + self._key_heads :], self._history, dim=1)
        attended = F.scaled_dot_product_attention(
            turned[:, :, : self._heads].transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask,
            enable_gqa=self._heads != self._key_heads,
        )
        return F.linear(attended.transpose(1, 2).flatten(2), self._output, self._output_bias)


def _rotate(vectors: Tensor, rotation: Tensor) -> Tensor:
    """Rotates adjacent pairs of elements of [rows, steps, heads, head size]."""
    pairs = torch.view_as_complex(vectors.float().view(*vectors.shape[:3], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(3).to(vectors.dtype)
