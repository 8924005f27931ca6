"""The results of transformers' implementation of Qwen3-Omni on a checkpoint: greedy, float32, one request at a time.

`run` computes them in a process of its own, which can import torchvision: the processors of images and video need it.
The process of the tests must not import it, because transformers would then use it everywhere.
"""

import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.repository.commands import ROOT

TORCHVISION = Path(sys.prefix) / "torchvision"
"""The folder into which `make venv` installs torchvision, apart from the other packages."""
SOUND_HZ = 16000


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


class Reference:
    """transformers' implementation, loaded from the folder of a checkpoint."""

    model_class = "Qwen3OmniMoeForConditionalGeneration"
    processor_class = "Qwen3OmniMoeProcessor"

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        self._folder = folder
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self.model: Any = getattr(transformers, self.model_class).from_pretrained(folder, dtype=torch.float32)
        self._codes: Any = None
        self._record_codes()

    def generate(self, conversation: Conversation, *, text_tokens: int, codec_tokens: int) -> Result:
        """Computes at most `text_tokens` tokens of text and `codec_tokens` codec tokens."""
        inputs = self._prepare(conversation)
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
                **self._arguments(conversation),
                **conversation.options,
            )
        prompt = inputs["input_ids"].shape[1]
        return Result(
            prompt_ids=sequences[0, :prompt].numpy(),
            text_ids=sequences[0, prompt:].numpy(),
            codes=self._codes.numpy(),
            waveform=waveform.flatten().numpy(),
        )

    def _record_codes(self) -> None:
        """Prepares the model to store the codes [frames, groups] that the vocoder receives."""
        # Checkpoints lack it, but transformers 5.19 reads it for prompts with audio and vision.
        self.model.talker.config.audio_config = self.model.thinker.config.audio_config
        chunked_decode = self.model.code2wav.chunked_decode

        def record(codes: Any, **sizes: int) -> Any:
            self._codes = codes[0].T
            return chunked_decode(codes, **sizes)

        self.model.code2wav.chunked_decode = record

    def _arguments(self, conversation: Conversation) -> dict[str, Any]:
        """Returns further arguments of `generate`."""
        # transformers does not pass it on to the talker.
        return {"talker_use_audio_in_video": conversation.use_audio_in_video}

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
            return dict(self.tokenizer(text, return_tensors="pt"))
        import transformers

        if conversation.videos:
            media |= {"fps": conversation.frame_rate, "use_audio_in_video": conversation.use_audio_in_video}
        processor = getattr(transformers, self.processor_class).from_pretrained(self._folder)
        return dict(processor(text=text, return_tensors="pt", **media))


def run(
    folder: Path, conversations: Sequence[Conversation], *, text_tokens: int, codec_tokens: int, module: str = __name__
) -> list[Result]:
    """Computes the results of `conversations` in a process that can import torchvision. Takes seconds.

    `module` is the name of the module whose `main` the process runs.
    """
    command = [sys.executable, "-m", module]
    path = os.pathsep.join(filter(None, [str(ROOT), str(TORCHVISION), os.environ.get("PYTHONPATH")]))
    arguments = pickle.dumps((folder, conversations, text_tokens, codec_tokens))
    ran = subprocess.run(
        command, input=arguments, capture_output=True, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}
    )
    assert ran.returncode == 0, ran.stderr.decode()
    results: list[Result] = pickle.loads(ran.stdout)  # noqa: S301 - of the process that was started here
    return results


def main(kind: type[Reference]) -> None:
    """Reads the arguments of `run` from stdin, and writes its results to stdout."""
    from stagemesh.services.engines.vllm.torchvision_operators import declare_operators

    folder, conversations, text_tokens, codec_tokens = pickle.load(sys.stdin.buffer)  # noqa: S301 - see `run`
    declare_operators()
    reference = kind(folder)
    results = [reference.generate(each, text_tokens=text_tokens, codec_tokens=codec_tokens) for each in conversations]
    # The class of the results must not be that of __main__, which `run` cannot import.
    from tests.models.qwen3_omni import reference as importable

    sys.stdout.buffer.write(pickle.dumps([importable.Result(**vars(result)) for result in results]))


if __name__ == "__main__":
    main(Reference)
