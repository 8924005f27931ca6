"""The reference of Qwen3-Omni: transformers' implementation, greedy, one request at a time."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stagemesh.common.tensors import Array
from stagemesh.services.models.verification.base import load_model, to_numpy
from stagemesh.services.models.verification.forcing import ForcedTokens


@dataclass(frozen=True)
class Conversation:
    """Messages as the chat template expects them, and the media of their parts in order."""

    messages: Sequence[dict[str, Any]]
    images: Sequence[NDArray[np.uint8]] = ()
    """Each [height, width, 3]."""
    audio: Sequence[NDArray[np.float32]] = ()
    """Each [samples] at 16 kHz. The sound of a video, too, if `use_audio_in_video`."""
    videos: Sequence[NDArray[np.uint8]] = ()
    """Each [frames, height, width, 3]."""
    frame_rate: float = 2.0
    use_audio_in_video: bool = False
    speaker: str = "Ethan"
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of `generate`, for example talker_repetition_penalty."""


@dataclass(frozen=True)
class Result:
    """The outputs of one conversation."""

    prompt_ids: NDArray[np.int64]
    text_ids: NDArray[np.int64]
    """The tokens of the answer, with the last token of the turn if the text ended by itself."""
    codes: NDArray[np.int64]
    """[frames, groups], without the frame of the end."""
    waveform: NDArray[np.float32]
    """[samples] at 24 kHz."""
    states: NDArray[np.float32]
    """The thinker's states that the talker accepts, [tokens, width]. Without the last token of the answer."""


@dataclass(frozen=True)
class Forced:
    """Recorders of the choices of a pipeline, which the reference repeats."""

    text: ForcedTokens
    first_codes: ForcedTokens
    residual_codes: ForcedTokens
    """Contains the codes of all frames, one frame after another."""


class Reference:
    """transformers' implementation, loaded from the folder of a checkpoint."""

    def __init__(self, folder: Path, *, precision: str = "float32", device: str = "cpu") -> None:
        from transformers import AutoTokenizer, Qwen3OmniMoeForConditionalGeneration

        self._folder = folder
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        dtype = getattr(torch, precision)
        self.model: Any = load_model(Qwen3OmniMoeForConditionalGeneration, folder, dtype=dtype, device=device)
        # Checkpoints lack it, but transformers 5.19 reads it for prompts with audio and vision.
        self.model.talker.config.audio_config = self.model.thinker.config.audio_config
        # The code predictor of a frame is called within the talker's step, and code2wav at the end.
        self._generate_residuals = self.model.talker.code_predictor.generate
        self._chunked_decode, self.model.code2wav.chunked_decode = (
            self.model.code2wav.chunked_decode,
            self._record_codes,
        )
        self._think, self.model.thinker.generate = self.model.thinker.generate, self._record_states
        self.model.code2wav.float()
        self._codes: Any = None
        self._states: Any = None

    def generate(
        self, conversation: Conversation, *, text_tokens: int, codec_tokens: int, forced: Forced | None = None
    ) -> Result:
        """Computes at most `text_tokens` tokens of text and `codec_tokens` codec tokens.

        If `forced` is not None, the choices are those of a pipeline.
        """
        inputs = self._prepare(conversation)
        with warnings.catch_warnings():
            # The talker's prompt consists of states, so its repetition penalty applies only to generated codes.
            warnings.filterwarnings("ignore", "Passing `repetition_penalty` with `inputs_embeds`")
            sequences, waveform = self.model.generate(
                **inputs,
                speaker=conversation.speaker,
                return_audio=True,
                thinker_max_new_tokens=text_tokens,
                thinker_eos_token_id=self.model.config.im_end_token_id,
                thinker_do_sample=False,
                talker_max_new_tokens=codec_tokens,
                talker_do_sample=False,
                use_audio_in_video=conversation.use_audio_in_video,
                # transformers does not pass it on to the talker.
                talker_use_audio_in_video=conversation.use_audio_in_video,
                **conversation.options,
                **self._force(forced),
            )
        prompt = inputs["input_ids"].shape[1]
        sequences = sequences.cpu()
        return Result(
            prompt_ids=sequences[0, :prompt].numpy(),
            text_ids=sequences[0, prompt:].numpy(),
            codes=self._codes[0].T.cpu().numpy(),
            waveform=waveform.flatten().cpu().numpy(),
            states=self._states,
        )

    def prompt_ids(self, conversation: Conversation) -> NDArray[np.int64]:
        """Returns the tokens of the prompt."""
        ids: NDArray[np.int64] = self._prepare(conversation)["input_ids"][0].cpu().numpy()
        return ids

    def decode(self, codes: Array) -> NDArray[np.float32]:
        """Converts frames, int[frames, groups], to samples at 24 kHz."""
        with torch.inference_mode():
            frames = torch.from_numpy(np.ascontiguousarray(codes.T[None])).long()
            return to_numpy(self._chunked_decode(frames.to(self.model.code2wav.device)).flatten())

    # -- internals

    def _force(self, forced: Forced | None) -> dict[str, Any]:
        """Returns the arguments with which the model repeats the choices."""
        from transformers import LogitsProcessorList

        predictor, generate = self.model.talker.code_predictor, self._generate_residuals
        if forced is None:
            predictor.generate = generate
            return {}
        text, first, residual = (
            LogitsProcessorList([each]) for each in (forced.text, forced.first_codes, forced.residual_codes)
        )
        predictor.generate = partial(generate, logits_processor=residual)
        return {"thinker_logits_processor": text, "talker_logits_processor": first}

    def _record_codes(self, codes: Any, **sizes: int) -> Any:
        self._codes = codes
        return self._chunked_decode(codes, **sizes)

    def _record_states(self, **arguments: Any) -> Any:
        result = self._think(**arguments)
        layer = self.model.config.talker_config.accept_hidden_layer
        self._states = to_numpy(torch.cat([states[layer][0] for states in result.hidden_states]))
        return result

    def _prepare(self, conversation: Conversation) -> dict[str, Any]:
        text = self.tokenizer.apply_chat_template(
            list(conversation.messages), add_generation_prompt=True, tokenize=False
        )
        media: dict[str, Any] = {
            "images": list(conversation.images),
            "audio": list(conversation.audio),
            "videos": list(conversation.videos),
        }
        media = {kind: items for kind, items in media.items() if items}
        if not media:
            return dict(self.tokenizer(text, return_tensors="pt").to(self.model.device))
        from transformers import Qwen3OmniMoeProcessor

        if conversation.videos:
            media |= {"fps": conversation.frame_rate, "use_audio_in_video": conversation.use_audio_in_video}
        processor: Any = Qwen3OmniMoeProcessor.from_pretrained(self._folder)
        return dict(processor(text=text, return_tensors="pt", **media).to(self.model.device))
