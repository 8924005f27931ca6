"""The results of transformers' implementation of Qwen2.5-Omni on a checkpoint. See that of Qwen3-Omni."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from stagemesh.verification.qwen3_omni import Result
from tests.models.qwen3_omni.reference import Conversation, main

SEED = 1
"""The seed of the vocoder's noise."""


class Reference:
    """transformers' implementation, with the noise that the stage token2wav has for a request with the seed `SEED`."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        self._folder = folder
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        kind: Any = transformers.Qwen2_5OmniForConditionalGeneration
        self.model: Any = kind.from_pretrained(folder, dtype=torch.float32)
        self._codes: Any = None
        self._record_codes()

    def generate(self, conversation: Conversation, *, text_tokens: int, codec_tokens: int) -> Result:
        """Computes at most `text_tokens` tokens of text and `codec_tokens` codec tokens."""
        inputs, talker = self._prepare(conversation), self.model.config.talker_config
        with warnings.catch_warnings():
            # The talker's prompt consists of states, so its repetition penalty applies only to generated codes.
            warnings.filterwarnings("ignore", "Passing `repetition_penalty` with `inputs_embeds`")
            sequences, waveform = self.model.generate(
                **inputs,
                speaker=conversation.speaker,
                return_audio=True,
                thinker_max_new_tokens=text_tokens,
                thinker_eos_token_id=self.tokenizer.eos_token_id,
                thinker_do_sample=False,
                talker_max_new_tokens=codec_tokens,
                talker_do_sample=False,
                use_audio_in_video=conversation.use_audio_in_video,
                talker_eos_token_id=[talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id],
                **conversation.options,
            )
        prompt = inputs["input_ids"].shape[1]
        return Result(
            prompt_ids=sequences[0, :prompt].numpy(),
            text_ids=sequences[0, prompt:].numpy(),
            codes=self._codes.numpy(),
            waveform=waveform.flatten().numpy(),
            states=np.empty(0, np.float32),
        )

    def _prepare(self, conversation: Conversation) -> dict[str, Any]:
        text = self.tokenizer.apply_chat_template(
            list(conversation.messages), add_generation_prompt=True, tokenize=False
        )
        kinds = {"images": conversation.images, "audio": conversation.audio, "videos": conversation.videos}
        media: dict[str, Any] = {kind: list(items) for kind, items in kinds.items() if items}
        if not media:
            return dict(self.tokenizer(text, return_tensors="pt"))
        import transformers

        if conversation.videos:
            media |= {"fps": conversation.frame_rate, "use_audio_in_video": conversation.use_audio_in_video}
        processor: Any = transformers.Qwen2_5OmniProcessor.from_pretrained(self._folder)
        inputs = processor(text=text, return_tensors="pt", **media)
        # transformers 5.19 passes the pixels to the talker, too, which rejects them.
        return {f"thinker_{name}" if name.startswith("pixel") else name: value for name, value in inputs.items()}

    def _record_codes(self) -> None:
        import torch

        from stagemesh.services.models.qwen2_5_omni.token2wav import draw_noise

        decoder = self.model.token2wav.code2wav_dit_model
        sample, config, randn = decoder.sample, decoder.config, torch.randn

        def draw(size: list[int], **_: Any) -> Any:
            blocks = range(-(-size[1] // config.block_size))
            noise = draw_noise(SEED, blocks, block=config.block_size, size=size[2])
            return torch.from_numpy(noise[None, : size[1]])

        def record(vector: Any, spectrogram: Any, codes: Any, **options: Any) -> Any:
            self._codes = codes[0][:, None]
            torch.randn = draw  # type: ignore[assignment]
            try:
                return sample(vector, spectrogram, codes, **options)
            finally:
                torch.randn = randn

        decoder.sample = record
        self.model.talker.register_forward_pre_hook(_restore_mask, with_kwargs=True)


def _restore_mask(_talker: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Gives the talker its attention mask again.

    `generate` of transformers 5.19 drops a mask without padding. Without a mask, the talker adds no codes to the last
    rows of its prompt, and ignores the positions of media. The model was trained with both.
    """
    import torch

    rows = next(options[name] for name in ("inputs_embeds", "input_ids") if options.get(name) is not None)
    length = options["past_key_values"].get_seq_length() + rows.shape[1]
    return arguments, {**options, "attention_mask": torch.ones(1, length, dtype=torch.long)}


if __name__ == "__main__":
    main(Reference)
