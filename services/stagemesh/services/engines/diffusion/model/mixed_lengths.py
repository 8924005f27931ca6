"""Shared forward passes of Qwen-Image's transformer for calls with different prompt lengths and image sizes.

Each call is one row of the batch. All layers except attention process each token independently. Rows are therefore
padded to the length of the longest row, and the outputs for padding are discarded. Attention and token positions are
computed for each row separately. A row's result therefore equals the result of computing the row alone, except for
rounding errors: the order in which the matrix library adds numbers may depend on the number of rows.

In strict mode (`MKL_CBWR=AVX2,STRICT`), MKL's order of additions does not depend on the number of rows of a matrix if
the matrix has at least 8 rows and its width is a multiple of 32. In strict mode, this module computes layers with fewer
matrix rows for each row of the batch separately. A row's result is then bit-identical to the result of computing the
row alone.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch.nn.utils.rnn import pad_sequence

from stagemesh.common.process.settings import library_variable

_pad = partial(pad_sequence, batch_first=True)
"""Joins tensors of shape [length, ...] to one of shape [rows, length of the longest row, ...], padded with zeros."""
_STRICT_ROWS = 8
"""Minimum number of matrix rows for which a row's result in MKL's strict mode does not depend on the number of rows."""


@dataclass(frozen=True)
class _Row:
    """One row of a batch: its numbers of tokens and its attention mask."""

    image_tokens: int
    text_tokens: int
    mask: torch.Tensor | None
    """Attention mask of shape and type bool[1, 1, 1, text and image tokens]. True for tokens to attend to. None if
    attention covers all tokens."""


class MixedLengthForward:
    """Runs shared forward passes of a `QwenImageTransformer2DModel` for calls with different numbers of tokens."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._strict = library_variable("MKL_CBWR").upper().endswith("STRICT")

    def can_join(self, inputs: Mapping[str, Any]) -> bool:
        """Returns whether a call with these inputs may share a forward pass with other calls.

        Returns False in MKL's strict mode if the call has too few text or image tokens.
        """
        tokens = min(inputs[name].shape[1] for name in ("hidden_states", "encoder_hidden_states"))
        return not self._strict or tokens >= _STRICT_ROWS

    def forward(self, inputs: Sequence[Mapping[str, Any]]) -> list[tuple[torch.Tensor]]:
        """Computes several transformer calls in one forward pass and returns one prediction for each call.

        `inputs` contains the inputs of each call. The inputs of two calls may differ only in their tensors and in
        `img_shapes`.
        """
        rows = [_row(each["hidden_states"], each["encoder_hidden_states"], each) for each in inputs]
        joined = {
            **inputs[0],
            "hidden_states": _pad([each["hidden_states"][0] for each in inputs]),
            "encoder_hidden_states": _pad([each["encoder_hidden_states"][0] for each in inputs]),
            "encoder_hidden_states_mask": None,
            "timestep": torch.cat([each["timestep"] for each in inputs]),
            "img_shapes": [shape for each in inputs for shape in each["img_shapes"]],
        }
        with self._separate_rows(rows):
            (sample,) = self._model(**joined)
        return [(sample[i : i + 1, : row.image_tokens],) for i, row in enumerate(rows)]

    # -- inner workings

    @contextmanager
    def _separate_rows(self, rows: Sequence[_Row]) -> Generator[None]:
        model = self._model
        embed = model.pos_embed

        def positions(img_shapes: Sequence[Any], **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return _positions(embed, img_shapes, rows, **kwargs)

        replaced: list[tuple[Any, str, Callable[..., Any]]] = [(model, "pos_embed", positions)]
        attentions = [block.attn for block in model.transformer_blocks]
        replaced += [(each, "processor", _AttentionByRow(rows, each.processor)) for each in attentions]
        if self._strict:
            small = [(model, "time_text_embed"), (model.norm_out, "linear")]
            small += [(block, name) for block in model.transformer_blocks for name in ("img_mod", "txt_mod")]
            replaced += [(owner, name, _by_row(getattr(owner, name))) for owner, name in small]
        # An attribute in the object's own `__dict__` takes precedence over its submodule of that name.
        previous: list[Any] = [vars(owner).get(name) for owner, name, _ in replaced]
        for owner, name, function in replaced:
            vars(owner)[name] = function
        try:
            yield
        finally:
            for (owner, name, _), before in zip(replaced, previous, strict=True):
                del vars(owner)[name]
                if before is not None:
                    vars(owner)[name] = before


class _AttentionByRow:
    """An attention processor that computes joint text and image attention separately for each row of a batch.

    Replaces the processor of diffusers' `Attention` while a shared forward pass runs.
    """

    def __init__(self, rows: Sequence[_Row], stock: Any) -> None:
        self._rows, self._stock = rows, stock

    def __call__(  # noqa: PLR0917  # the signature that diffusers calls
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: None = None,
        attention_mask: None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes joint attention over image and text tokens. Returns the outputs for the image tokens and for the
        text tokens.

        `hidden_states` are the image states and `encoder_hidden_states` the text states. Both have the shape [rows,
        length of the longest row, width].
        """
        assert encoder_hidden_states_mask is attention_mask is None, "each row has its own mask"
        assert image_rotary_emb is not None, "the model uses rotary positions"
        image_positions, text_positions = image_rotary_emb
        head = attn.inner_dim // attn.heads
        image = _heads(hidden_states, (attn.to_q, attn.to_k, attn.to_v), head)
        text = _heads(encoder_hidden_states, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj), head)
        for streams, norms, positions in (
            (image, (attn.norm_q, attn.norm_k), image_positions),
            (text, (attn.norm_added_q, attn.norm_added_k), text_positions),
        ):
            for i, norm in enumerate(norms):
                streams[i] = _rotate(norm(streams[i]) if norm is not None else streams[i], positions)
        image_out, text_out = torch.zeros_like(hidden_states), torch.zeros_like(encoder_hidden_states)
        for i, row in enumerate(self._rows):
            attended = self._attend(i, row, text, image)
            text_out[i, : row.text_tokens] = attended[0, : row.text_tokens]
            image_out[i, : row.image_tokens] = attended[0, row.text_tokens :]
        for layer in attn.to_out:
            image_out = layer(image_out)
        return image_out, attn.to_add_out(text_out)

    def _attend(self, i: int, row: _Row, text: Sequence[torch.Tensor], image: Sequence[torch.Tensor]) -> torch.Tensor:
        query, key, value = (
            torch.cat([words[i : i + 1, : row.text_tokens], patches[i : i + 1, : row.image_tokens]], dim=1)
            for words, patches in zip(text, image, strict=True)
        )
        attended: torch.Tensor = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=row.mask,
            backend=self._stock._attention_backend,  # noqa: SLF001
            parallel_config=self._stock._parallel_config,  # noqa: SLF001
        )
        return attended.flatten(2, 3).to(query.dtype)


def _by_row(layer: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns a function that applies `layer` to each row of a batch separately and concatenates the results."""

    def apply_by_row(batch: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        rows = range(len(batch))
        return torch.cat(
            [layer(batch[i : i + 1], *(each if each is None else each[i : i + 1] for each in others)) for i in rows]
        )

    return apply_by_row


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
    """Returns the rotary position embeddings of the image tokens and of the text tokens.

    Both have the shape and type complex[rows, length of the longest row, 1, half the head size].
    """
    del max_txt_seq_len
    row_positions = [
        embed([shape], max_txt_seq_len=row.text_tokens, device=device)
        for shape, row in zip(img_shapes, rows, strict=True)
    ]
    image, text = zip(*row_positions, strict=True)
    return _pad(list(image))[:, :, None], _pad(list(text))[:, :, None]


def _heads(states: torch.Tensor, projections: Sequence[Any], head: int) -> list[torch.Tensor]:
    return [projection(states).unflatten(-1, (-1, head)) for projection in projections]


def _rotate(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns `states` with rotary position embeddings applied.

    `states` has the shape [rows, tokens, heads, head size]. `positions` is complex[rows, tokens, 1, half the head
    size].
    """
    pairs = torch.view_as_complex(states.float().reshape(*states.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * positions).flatten(3).type_as(states)
