"""Rows of different lengths in one forward of Qwen-Image's transformer: prompts, sizes and guidance may all differ.

Everything but attention treats each token alone, so rows are filled up to the longest, and what the filling becomes is
never looked at. Attention, and the positions that go into it, are each row's own: a row gets what it gets alone, up to
the order in which the matrix library adds. With MKL in strict mode (`MKL_CBWR=AVX2,STRICT`) that order does not depend
on the number of rows, from a few rows on and for widths that are multiples of 32: what has fewer rows is then computed
apart, and each row gets what it gets alone, bit for bit.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

from stagemesh.common.settings import library_variable
from stagemesh.services.engines.diffusion.batching.recorded_calls import Answer, Call

_STRICT_ROWS = 8
"""From so many rows on, strict MKL multiplies each as it would any other number of them."""


@dataclass(frozen=True)
class _Row:
    """One row's own part of a forward."""

    image_tokens: int
    text_tokens: int
    mask: torch.Tensor | None
    """bool[1, 1, 1, text and image tokens]: what is looked at; None for all."""


class MixedRows:
    """Forwards of a `QwenImageTransformer2DModel` over rows of different lengths."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._strict = library_variable("MKL_CBWR").upper().endswith("STRICT")

    def can_join(self, call: Call) -> bool:
        """Whether the call may share a forward with others."""
        tokens = min(call.inputs[name].shape[1] for name in ("hidden_states", "encoder_hidden_states"))
        return not self._strict or tokens >= _STRICT_ROWS

    def forward(self, calls: Sequence[Call]) -> list[Answer]:
        """The answer to each call. Calls differ in tensors and `img_shapes` alone."""
        inputs = [call.inputs for call in calls]
        rows = [_row(each["hidden_states"], each["encoder_hidden_states"], each) for each in inputs]
        joint = {
            **inputs[0],
            "hidden_states": _filled([each["hidden_states"] for each in inputs]),
            "encoder_hidden_states": _filled([each["encoder_hidden_states"] for each in inputs]),
            "encoder_hidden_states_mask": None,
            "timestep": torch.cat([each["timestep"] for each in inputs]),
            "img_shapes": [shape for each in inputs for shape in each["img_shapes"]],
        }
        with self._rows_apart(rows):
            (sample,) = self._model(**joint)
        return [(sample[i : i + 1, : row.image_tokens],) for i, row in enumerate(rows)]

    # -- inner workings

    @contextmanager
    def _rows_apart(self, rows: Sequence[_Row]) -> Generator[None]:
        model = self._model
        attentions = [block.attn for block in model.transformer_blocks]
        processors = [attention.processor for attention in attentions]
        embed = model.pos_embed

        def positions(img_shapes: Sequence[Any], **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return _positions(embed, img_shapes, rows, **kwargs)

        replaced: list[tuple[Any, str, Callable[..., Any]]] = [(model, "pos_embed", positions)]
        if self._strict:
            few = [(model, "time_text_embed"), (model.norm_out, "linear")]
            few += [(block, name) for block in model.transformer_blocks for name in ("img_mod", "txt_mod")]
            replaced += [(owner, name, _by_row(getattr(owner, name))) for owner, name in few]
        # What is set on the object itself comes before its submodule of that name.
        for owner, name, function in replaced:
            vars(owner)[name] = function
        try:
            for attention, processor in zip(attentions, processors, strict=True):
                attention.processor = _AttentionByRow(rows, processor)
            yield
        finally:
            for owner, name, _ in replaced:
                del vars(owner)[name]
            for attention, processor in zip(attentions, processors, strict=True):
                attention.processor = processor


class _AttentionByRow:
    """A processor of `diffusers.models.attention_processor.Attention` with two streams, text and image."""

    def __init__(self, rows: Sequence[_Row], stock: Any) -> None:
        self._rows, self._stock = rows, stock

    def __call__(  # noqa: PLR0917  # as diffusers calls it
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: None = None,
        attention_mask: None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Shapes are [rows, longest, width] of image and text, and so are the returned ones."""
        assert encoder_hidden_states_mask is attention_mask is None, "masks are the rows' own"
        assert image_rotary_emb is not None, "the model has positions"
        image_positions, text_positions = image_rotary_emb
        head = attn.inner_dim // attn.heads
        image = _heads(hidden_states, (attn.to_q, attn.to_k, attn.to_v), head)
        text = _heads(encoder_hidden_states, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj), head)
        for streams, norms, turns in (
            (image, (attn.norm_q, attn.norm_k), image_positions),
            (text, (attn.norm_added_q, attn.norm_added_k), text_positions),
        ):
            for i, norm in enumerate(norms):
                streams[i] = _turned(norm(streams[i]) if norm is not None else streams[i], turns)
        image_out, text_out = torch.zeros_like(hidden_states), torch.zeros_like(encoder_hidden_states)
        for i, row in enumerate(self._rows):
            made = self._attend(i, row, text, image)
            text_out[i, : row.text_tokens] = made[0, : row.text_tokens]
            image_out[i, : row.image_tokens] = made[0, row.text_tokens :]
        for layer in attn.to_out:
            image_out = layer(image_out)
        return image_out, attn.to_add_out(text_out)

    def _attend(self, i: int, row: _Row, text: Sequence[torch.Tensor], image: Sequence[torch.Tensor]) -> torch.Tensor:
        query, key, value = (
            torch.cat([words[i : i + 1, : row.text_tokens], patches[i : i + 1, : row.image_tokens]], dim=1)
            for words, patches in zip(text, image, strict=True)
        )
        made: torch.Tensor = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=row.mask,
            backend=self._stock._attention_backend,  # noqa: SLF001
            parallel_config=self._stock._parallel_config,  # noqa: SLF001
        )
        return made.flatten(2, 3).to(query.dtype)


def _by_row(layer: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Of a batch, what the layer makes of each row alone."""

    def apart(batch: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        rows = range(len(batch))
        return torch.cat(
            [layer(batch[i : i + 1], *(each if each is None else each[i : i + 1] for each in others)) for i in rows]
        )

    return apart


def _row(latents: torch.Tensor, text: torch.Tensor, inputs: Any) -> _Row:
    image_tokens, text_tokens = latents.shape[1], text.shape[1]
    words = inputs.get("encoder_hidden_states_mask")
    if words is None:
        return _Row(image_tokens, text_tokens, None)
    patches = torch.ones((1, image_tokens), dtype=torch.bool, device=words.device)
    return _Row(image_tokens, text_tokens, torch.cat([words.to(torch.bool), patches], dim=1)[:, None, None, :])


def _positions(
    embed: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    img_shapes: Sequence[Any],
    rows: Sequence[_Row],
    *,
    max_txt_seq_len: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's own, complex[rows, longest, 1, half a head] of image and text."""
    del max_txt_seq_len
    own = [
        embed([shape], max_txt_seq_len=row.text_tokens, device=device)
        for shape, row in zip(img_shapes, rows, strict=True)
    ]
    image, text = zip(*own, strict=True)
    return _filled([each[None] for each in image])[:, :, None], _filled([each[None] for each in text])[:, :, None]


def _filled(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """[1, length, width] each to [rows, longest, width], with zeros after those that are shorter."""
    longest = max(row.shape[1] for row in rows)
    filled = rows[0].new_zeros((len(rows), longest, *rows[0].shape[2:]))
    for i, row in enumerate(rows):
        filled[i, : row.shape[1]] = row[0]
    return filled


def _heads(states: torch.Tensor, projections: Sequence[Any], head: int) -> list[torch.Tensor]:
    return [projection(states).unflatten(-1, (-1, head)) for projection in projections]


def _turned(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary positions: [rows, tokens, heads, head] turned by complex[rows, tokens, 1, half a head]."""
    pairs = torch.view_as_complex(states.float().reshape(*states.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * positions).flatten(3).type_as(states)
