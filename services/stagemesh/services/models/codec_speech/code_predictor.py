"""The code predictor of a codec language model, which predicts the residual codes of an audio frame, and its random
numbers, which do not depend on the batch.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # torch's own abbreviation

from stagemesh.services.engines.vllm.codec.base import SampledFrames

_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd multipliers of the SplitMix64 generator, as signed numbers."""


KeysAndValues: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""The keys and values of one layer, each [batch, heads, positions, head width]."""


class ResidualSampling(NamedTuple):
    """How a model draws residual codes: temperature, the number of candidates, and their total probability."""

    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0


class Draws:
    """Chooses the residual codes of a batch of frames: the most probable ones, or ones drawn at random.

    A random number depends only on the request's seed and the position of the frame, the group and the code. The codes
    of a request therefore do not depend on the other requests of its batch, and are the same if the frame is computed
    again.
    """

    def __init__(self, frames: SampledFrames, *, sampling: ResidualSampling) -> None:
        self._state, self._greedy, self._sampling = _mix(frames.seeds) + frames.positions, frames.greedy, sampling

    def choose(self, logits: torch.Tensor, group: int) -> torch.Tensor:
        """Returns one code for each frame, int64[frames]. `logits` is float32[frames, codes]."""
        best = logits.argmax(-1)
        if bool(self._greedy.all()):
            return best
        temperature, top_k, top_p = self._sampling
        values, codes = logits.topk(min(top_k, logits.shape[-1]), sorted=True)
        chances = (values / temperature).softmax(-1)
        chances[chances.cumsum(-1) - chances >= top_p] = 0
        mixed = _mix(_mix(self._state + group)[:, None] + codes)
        uniform = ((mixed >> 11) & ((1 << 53) - 1)).double() / (1 << 53)
        # The largest of the values u^(1/p) is at a code with the probability p of the code.
        drawn = (chances.log() - (-uniform.clamp_min(1e-300).log()).log()).argmax(-1, keepdim=True)
        return torch.where(self._greedy, best, codes.gather(-1, drawn)[:, 0])


def _mix(values: torch.Tensor) -> torch.Tensor:
    """Returns a hash of each int64 value (SplitMix64)."""
    values = values * _MIX[0] + _MIX[0]
    values = (values ^ (values >> 30 & (1 << 34) - 1)) * _MIX[1]
    values = (values ^ (values >> 27 & (1 << 37) - 1)) * _MIX[2]
    return values ^ (values >> 31 & (1 << 33) - 1)


class CodePredictor(nn.Module):
    """Predicts the residual codes of the frames of a batch. All parameters are loaded by their names in checkpoints."""

    def __init__(self, config: Any, *, outer_width: int | None = None) -> None:
        """`config` is the code predictor's part of the checkpoint's config, as transformers reads it.

        `outer_width` is the width of the language model if it differs from the predictor's. Its states and the
        embeddings have this width, and a projection to the predictor's follows.
        """
        super().__init__()
        self.groups = config.num_code_groups
        residuals, width = self.groups - 1, config.hidden_size
        outer = outer_width or width
        self.projection = nn.Identity() if outer == width else nn.Linear(outer, width)
        self.key_heads, self.head_width = config.num_key_value_heads, config.head_dim
        self.embeddings = nn.Parameter(torch.empty(residuals, config.vocab_size, outer), requires_grad=False)
        self.outputs = nn.Parameter(torch.empty(residuals, config.vocab_size, width), requires_grad=False)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(width, config.rms_norm_eps)
        frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.arange(self.groups + 1)[:, None] * torch.cat([frequencies, frequencies])
        self.cos: torch.Tensor
        self.sin: torch.Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def embed(self, residual_codes: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the embeddings of residual codes, [frames, outer width].

        `residual_codes` is int64[frames, groups - 1].
        """
        group = torch.arange(self.groups - 1, device=residual_codes.device)
        return self.embeddings[group, residual_codes].sum(1)

    def forward(self, states: torch.Tensor, first: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Returns the residual codes of the frames, int64[frames, groups - 1].

        `states` contains the talker's hidden states, and `first` the embeddings of the first codes, both
        [frames, outer width].
        """
        shape = (len(states), self.key_heads, self.groups + 1, self.head_width)
        cache = [(states.new_empty(shape), states.new_empty(shape)) for _ in self.layers]
        rows, codes, start = torch.stack([states, first], 1), list[torch.Tensor](), 0
        for group in range(self.groups - 1):
            hidden = self._run(rows, cache, start)
            logits = hidden[:, -1] @ self.outputs[group].T
            codes.append(draws.choose(logits.float(), group))
            start += rows.shape[1]
            rows = self.embeddings[group, codes[-1]][:, None]
        return torch.stack(codes, 1)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads the weights, whose names are those of a checkpoint. Returns the names of the loaded parameters."""
        loaded, targets = set[str](), self._targets()
        for name, weight in weights:
            parameter, target = targets[name]
            target.copy_(weight)
            loaded.add(parameter)
        return loaded

    # -- internals

    def _run(self, rows: torch.Tensor, cache: list[KeysAndValues], start: int) -> torch.Tensor:
        rows, count = self.projection(rows), rows.shape[1]
        cos, sin = self.cos[start : start + count].to(rows.dtype), self.sin[start : start + count].to(rows.dtype)
        for layer, past in zip(self.layers, cache, strict=True):
            rows = layer(rows, past, cos, sin, start)
        return self.norm(rows)  # type: ignore[no-any-return]

    def _targets(self) -> dict[str, tuple[str, torch.Tensor]]:
        """Returns the name of a parameter, and the part of it that a weight fills, by the weight's name."""
        targets = {"model.norm.weight": ("norm.weight", self.norm.weight.data)}
        for kind, parameter in self.projection.named_parameters():
            targets[f"small_to_mtp_projection.{kind}"] = (f"projection.{kind}", parameter.data)
        for group in range(self.groups - 1):
            targets[f"model.codec_embedding.{group}.weight"] = ("embeddings", self.embeddings[group])
            targets[f"lm_head.{group}.weight"] = ("outputs", self.outputs[group])
        for number, layer in enumerate(cast("Iterable[_Layer]", self.layers)):
            for name, (parameter_name, part) in layer.targets().items():
                targets[f"model.layers.{number}.{name}.weight"] = (f"layers.{number}.{parameter_name}", part)
        return targets


class _Layer(nn.Module):
    """A decoder layer with normalized queries and keys."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, self._sizes = config.hidden_size, (config.num_attention_heads, config.num_key_value_heads)
        heads, key_heads = self._sizes
        self._head_width, self._inner = config.head_dim, config.intermediate_size
        self.qkv = nn.Linear(width, (heads + 2 * key_heads) * config.head_dim, bias=False)
        self.output = nn.Linear(heads * config.head_dim, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, width, bias=False)
        self.query_norm, self.key_norm = (nn.RMSNorm(config.head_dim, config.rms_norm_eps) for _ in range(2))
        self.input_norm, self.inner_norm = (nn.RMSNorm(width, config.rms_norm_eps) for _ in range(2))

    def forward(
        self, rows: torch.Tensor, past: KeysAndValues, cos: torch.Tensor, sin: torch.Tensor, start: int
    ) -> torch.Tensor:
        (heads, key_heads), (batch, count, _) = self._sizes, rows.shape
        joint = self.qkv(self.input_norm(rows)).view(batch, count, heads + 2 * key_heads, self._head_width)
        query, key, value = joint.transpose(1, 2).split([heads, key_heads, key_heads], 1)
        query, key = _rotate(self.query_norm(query), cos, sin), _rotate(self.key_norm(key), cos, sin)
        (keys, values), end = past, start + count
        keys[:, :, start:end], values[:, :, start:end] = key, value
        keys, values = keys[:, :, :end], values[:, :, :end]
        mixed = F.scaled_dot_product_attention(query, keys, values, is_causal=not start, enable_gqa=True)
        rows = rows + self.output(mixed.transpose(1, 2).reshape(batch, count, -1))
        gate, up = self.gate_up(self.inner_norm(rows)).split(self._inner, -1)
        return rows + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]

    def targets(self) -> dict[str, tuple[str, torch.Tensor]]:
        """Returns the name of a parameter, and the part of it that a weight fills, by the weight's name."""
        heads, key_heads = (count * self._head_width for count in self._sizes)
        inner, qkv, gate_up = self._inner, self.qkv.weight.data, self.gate_up.weight.data
        return {
            "self_attn.q_proj": ("qkv.weight", qkv[:heads]),
            "self_attn.k_proj": ("qkv.weight", qkv[heads : heads + key_heads]),
            "self_attn.v_proj": ("qkv.weight", qkv[heads + key_heads :]),
            "self_attn.o_proj": ("output.weight", self.output.weight.data),
            "self_attn.q_norm": ("query_norm.weight", self.query_norm.weight.data),
            "self_attn.k_norm": ("key_norm.weight", self.key_norm.weight.data),
            "mlp.gate_proj": ("gate_up.weight", gate_up[:inner]),
            "mlp.up_proj": ("gate_up.weight", gate_up[inner:]),
            "mlp.down_proj": ("down.weight", self.down.weight.data),
            "input_layernorm": ("input_norm.weight", self.input_norm.weight.data),
            "post_attention_layernorm": ("inner_norm.weight", self.inner_norm.weight.data),
        }


def _rotate(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = rows.chunk(2, -1)
    return rows * cos + torch.cat([-second, first], -1) * sin
