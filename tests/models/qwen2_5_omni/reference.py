"""The results of transformers' implementation of Qwen2.5-Omni on a checkpoint. See that of Qwen3-Omni."""

from typing import Any

from tests.models.qwen3_omni import reference
from tests.models.qwen3_omni.reference import Conversation

SEED = 1
"""The seed of the vocoder's noise."""


class Reference(reference.Reference):
    """transformers' implementation, with the noise that the stage token2wav has for a request with the seed `SEED`."""

    model_class = "Qwen2_5OmniForConditionalGeneration"
    processor_class = "Qwen2_5OmniProcessor"

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

    def _prepare(self, conversation: Conversation) -> dict[str, Any]:
        # transformers 5.19 passes the pixels to the talker, too, which rejects them.
        inputs = super()._prepare(conversation)
        return {f"thinker_{name}" if name.startswith("pixel") else name: value for name, value in inputs.items()}

    def _arguments(self, conversation: Conversation) -> dict[str, Any]:
        talker = self.model.config.talker_config
        return {"talker_eos_token_id": [talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id]}


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
    reference.main(Reference)
