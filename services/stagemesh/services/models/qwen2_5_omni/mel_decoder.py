"""The diffusion transformer of token2wav in a streaming form: it converts codes to frames of a mel spectrogram.

The transformer attends within blocks of frames. A few of its layers attend to the block before, too, or to the block
after. A differential equation is solved from noise to the spectrogram, and each evaluation runs the transformer. The
frames of a block therefore depend on all earlier blocks, and on one more later block for each evaluation.

A stream is solved in windows of whole blocks. The first blocks of a window are final. The blocks that follow are
solved only because the final blocks look ahead to them, and are solved again in the next window. For each evaluation,
the stream retains the keys and values that the next window looks back to. Earlier blocks therefore have their full
effect and are never computed again. Only the limited look-ahead changes the result.

The modules of transformers contain the weights. In shapes, `rows` is the number of streams in a batch. A batch of the
transformer has twice as many rows: first all rows with their condition, then all rows without it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own convention
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    DiTDecoderLayer,
    Qwen2_5OmniToken2WavDiTModel,
    deinterleave_head_dim,
)

_GUIDANCE = 0.5
"""The weight by which the difference between the results with and without condition is added."""


@dataclass
class _Past:
    """The keys and values of one block, which a window looks back to, in the order in which they are used.

    Each is [2 rows, 1, heads, block, head size].
    """

    given: Iterator[Tensor] | None
    """None for the first window of a stream."""
    kept_block: int
    """The index of the last final block, whose keys and values are retained."""
    retained: list[Tensor] = field(default_factory=list[Tensor])

    def before(self, blocks: Tensor) -> Tensor:
        """Returns the block before each of `blocks` [2 rows, blocks, heads, block, head size]. Zeros if there is none.

        Retains the last final block.
        """
        first = torch.zeros_like(blocks[:, :1]) if self.given is None else next(self.given)
        self.retained.append(blocks[:, self.kept_block : self.kept_block + 1])
        return torch.cat((first, blocks[:, :-1]), 1)


class MelDecoder:
    """Solves windows of streams. All windows of a batch have the same length."""

    def __init__(self, model: Qwen2_5OmniToken2WavDiTModel, *, steps: int) -> None:
        """`steps` is the number of points in time at which the solution of the equation is computed."""
        config = model.config
        self._layers = cast("list[DiTDecoderLayer]", list(model.transformer_blocks))
        self._model, self._repeats, self.mel_size = model, config.repeats, config.mel_dim
        self.block, self._heads, self._head_size = config.block_size, config.num_attention_heads, config.head_dim
        self.codes_in_block, self.codebook_size = config.block_size // config.repeats, config.num_embeds + 1
        device = model.proj_out.weight.device
        self._times = 1 - torch.cos(torch.pi / 2 * torch.linspace(0, 1, steps, device=device))
        positions = torch.arange(-self.block, 2 * self.block, device=device)[None]
        self._rotation = model.rotary_embed(model.proj_out.weight, positions)
        sizes = [config.mel_dim, config.enc_dim, config.emb_dim, config.enc_emb_dim]
        parts: tuple[Tensor, ...] = torch.split(model.input_embed.proj.weight, sizes, 1)
        # The input is a sum of projections: those of the noise, the reference, the codes and the speaker's vector.
        self._project_value, self._project_reference, self._project_codes, self._project_vector = parts

    def embed_voice(self, vector: Tensor, reference: Tensor) -> Tensor:
        """Returns the inputs of a speaker with and without condition, [2, width].

        `vector` [size] represents the speaker, and `reference` [frames, mel size] is a spectrogram of the speaker.
        """
        references = torch.stack((reference, torch.zeros_like(reference)))
        vectors = torch.stack((vector, torch.zeros_like(vector)))
        encoded = F.linear(self._model.input_embed.spk_encoder(references), self._project_reference)
        return encoded + F.linear(vectors, self._project_vector, self._model.input_embed.proj.bias)

    def solve(
        self, noise: Tensor, codes: Tensor, voices: Tensor, past: Tensor | None, *, kept_blocks: int
    ) -> tuple[Tensor, Tensor]:
        """Returns the spectrograms of windows, [rows, frames, mel size], and the values to retain.

        - `noise` [rows, frames, mel size]: the start of the solution
        - `codes` int64[rows, codes]: the codes of the window, a part of a block only at the end of the stream
        - `voices` [rows, 2, width]: see `embed_voice`
        - `past` [rows, values, 2, heads, block, head size]: the retained values of the window before, or None for the
          first window of the streams
        - `kept_blocks`: the number of final blocks
        """
        frames, padding = noise.shape[1], -noise.shape[1] % self.block
        constant = F.pad(self._embed(codes, voices), (0, 0, 0, padding))
        given = None if past is None else iter(past.permute(1, 2, 0, 3, 4, 5).flatten(1, 2)[:, :, None])
        memory = _Past(given, kept_blocks - 1)
        value, masks = F.pad(noise, (0, 0, 0, padding)), self._masks(frames, has_past=past is not None)
        for start, end in zip(self._times[:-1], self._times[1:], strict=True):
            step = end - start
            first = self._evaluate(start, value, constant, memory, masks)
            second = self._evaluate(start + step / 3, value + step * first / 3, constant, memory, masks)
            third = self._evaluate(start + step * 2 / 3, value + step * (second - first / 3), constant, memory, masks)
            fourth = self._evaluate(end, value + step * (first - second + third), constant, memory, masks)
            value = value + (first + 3 * (second + third) + fourth) * step / 8
        retained = torch.stack([torch.stack(each[:, 0].chunk(2), 1) for each in memory.retained], 1)
        return value[:, :frames], retained

    # -- internals

    def _embed(self, codes: Tensor, voices: Tensor) -> Tensor:
        """Returns the part of the transformer's input that does not depend on the solution, [2 rows, frames, width]."""
        embedded = self._model.text_embed.codec_embed(torch.cat((codes, torch.zeros_like(codes))))
        projected = F.linear(embedded, self._project_codes)
        return torch.repeat_interleave(projected, self._repeats, 1) + voices.transpose(0, 1).flatten(0, 1)[:, None]

    def _masks(self, frames: int, *, has_past: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns which frames exist in the block before each block, in the block itself and in the block after it.

        Each is bool[blocks, block].
        """
        device = self._times.device
        own = (torch.arange(-(-frames // self.block) * self.block, device=device) < frames).view(-1, self.block)
        before = torch.ones_like(own)
        before[0] = has_past
        return before, own, torch.cat((own[1:], torch.zeros_like(own[:1])))

    def _evaluate(
        self, time: Tensor, value: Tensor, constant: Tensor, past: _Past, masks: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        """Returns the derivative of the solution, [rows, frames, mel size]."""
        moved = F.linear(value, self._project_value)
        hidden, embedded = constant + torch.cat((moved, moved)), self._model.time_embed(time[None])
        for layer in self._layers:
            hidden = self._run(layer, hidden, embedded, past, masks)
        with_condition, without = self._model.proj_out(self._model.norm_out(hidden, embedded)).chunk(2)
        return with_condition + (with_condition - without) * _GUIDANCE  # type: ignore[no-any-return]

    def _run(
        self, layer: DiTDecoderLayer, hidden: Tensor, time: Tensor, past: _Past, masks: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        normed, attention_gate, shift, scale, gate = layer.attn_norm(hidden, emb=time)
        hidden = hidden + attention_gate[:, None] * self._attend(layer, normed, past, masks)
        return hidden + gate[:, None] * layer.ff(layer.ff_norm(hidden) * (1 + scale[:, None]) + shift[:, None])  # type: ignore[no-any-return]

    def _attend(
        self, layer: DiTDecoderLayer, hidden: Tensor, past: _Past, masks: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        attention = layer.attn
        query, keys, values = (
            project(hidden).view(len(hidden), -1, self.block, self._heads, self._head_size).transpose(2, 3)
            for project in (attention.to_q, attention.to_k, attention.to_v)
        )
        own, back, ahead = (keys, values), bool(layer.look_backward_block), bool(layer.look_ahead_block)
        if back:
            keys, values = (torch.cat((past.before(each), each), 3) for each in own)
        if ahead:
            after = [torch.cat((each[:, 1:], torch.zeros_like(each[:, :1])), 1) for each in own]
            keys, values = torch.cat((keys, after[0]), 3), torch.cat((values, after[1]), 3)
        start, end = 1 - back, 2 + ahead
        mask = torch.cat(masks[start:end], 1)[:, None, None].repeat(len(hidden), 1, 1, 1)
        mixed = F.scaled_dot_product_attention(
            self._rotate(query, 1, 2).flatten(0, 1),
            self._rotate(keys, start, end).flatten(0, 1),
            values.flatten(0, 1),
            attn_mask=mask,
        )
        return attention.to_out[0](mixed.transpose(1, 2).reshape(*hidden.shape[:2], -1))  # type: ignore[no-any-return]

    def _rotate(self, vectors: Tensor, start: int, end: int) -> Tensor:
        """Rotates the first head of [2 rows, blocks, heads, frames, head size] by the positions of the frames.

        Positions count from the block of the queries. `start` and `end` are the positions in blocks, plus 1.
        """
        cos, sin = (each[:, start * self.block : end * self.block] for each in self._rotation)
        first, others = deinterleave_head_dim(vectors[:, :, :1]), vectors[:, :, 1:]
        turned = torch.cat((-first[..., self._head_size // 2 :], first[..., : self._head_size // 2]), -1)
        return torch.cat((first * cos + turned * sin, others), 2)
