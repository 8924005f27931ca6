"""pipecat: a language model with a tool, speech, transcription and realtime, each in a pipeline."""

import os

from features import run_features
from pipecat.frames import frames
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.openai.realtime import events
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.services.openai.responses.llm import OpenAIResponsesHttpLLMService, OpenAIResponsesLLMService
from pipecat.services.openai.stt import OpenAISTTService
from pipecat.services.openai.tts import OpenAITTSService
from pipecat.workers.runner import WorkerRunner

WEBSOCKETS = os.environ["OPENAI_BASE_URL"].replace("http", "ws")
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What time is it?"}]


class Listener(FrameProcessor):
    """Collects frames of a type. Ends the pipeline after one of the type `last`, or once their text is `last`."""

    def __init__(self, kind, last):
        super().__init__()
        self.frames, self._kind, self._last = [], kind, last

    async def process_frame(self, frame, direction):
        await super().process_frame(frame, direction)
        if isinstance(frame, self._kind):
            self.frames.append(frame)
        if self.text == self._last if isinstance(self._last, str) else isinstance(frame, self._last):
            await self.push_frame(frames.EndWorkerFrame(), FrameDirection.UPSTREAM)
        await self.push_frame(frame, direction)

    @property
    def text(self):
        return "".join(getattr(frame, "text", "") for frame in self.frames)


async def run(service, *sent, kind, last, tools=()):
    """Runs a service in a pipeline. Returns the frames of a type that left it. Fails at the first error."""
    listener, pair, errors = Listener(kind, last), LLMContextAggregatorPair(LLMContext([*QUESTION], list(tools))), []
    worker = PipelineWorker(Pipeline([pair.user(), service, listener, pair.assistant()]), idle_timeout_secs=60)

    @worker.event_handler("on_pipeline_error")
    async def fail(worker, frame):
        errors.append(frame.error)
        await worker.cancel()

    await worker.queue_frames(sent)
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    await runner.run()
    assert not errors, errors
    assert listener.frames
    return listener


async def answer(service, *tools, text):
    """Lets a service answer the question."""
    heard = await run(service, frames.LLMRunFrame(), kind=frames.LLMTextFrame, last=text, tools=tools)
    assert heard.text == text


async def read_clock(params, zone: str):
    """Reads the clock.

    Args:
        zone: A time zone.
    """
    await params.result_callback(f"12:00 in {zone}")


async def llm():
    await answer(OpenAILLMService(settings=OpenAILLMService.Settings(model="scripted")), text="Hello there.")


async def tools():
    service = OpenAILLMService(settings=OpenAILLMService.Settings(model="scripted"))
    await answer(service, read_clock, text="It is noon.")


async def responses():
    service = OpenAIResponsesHttpLLMService(settings=OpenAIResponsesHttpLLMService.Settings(model="scripted"))
    await answer(service, read_clock, text="It is noon.")


async def responses_over_a_websocket():
    settings = OpenAIResponsesLLMService.Settings(model="scripted")
    service = OpenAIResponsesLLMService(ws_url=f"{WEBSOCKETS}/responses", settings=settings)
    await answer(service, read_clock, text="It is noon.")


async def tts():
    sentence = frames.TTSSpeakFrame("The sea is calm.")
    await run(OpenAITTSService(), sentence, kind=frames.TTSAudioRawFrame, last=frames.TTSStoppedFrame)


async def stt():
    sound = [frames.InputAudioRawFrame(bytes(640), 16_000, 1)] * 50
    sent = [frames.VADUserStartedSpeakingFrame(), *sound, frames.VADUserStoppedSpeakingFrame()]
    await run(OpenAISTTService(), *sent, kind=frames.TranscriptionFrame, last=frames.TranscriptionFrame)


def talker(model, **properties):
    """Returns a realtime service with the properties of pipecat's own example."""
    sound = events.AudioInput(
        transcription=events.InputAudioTranscription(),
        turn_detection=events.SemanticTurnDetection(),
        noise_reduction=events.InputAudioNoiseReduction(type="near_field"),
    )
    session = events.SessionProperties(audio=events.AudioConfiguration(input=sound), **properties)
    settings = OpenAIRealtimeLLMService.Settings(model=model, session_properties=session)
    return OpenAIRealtimeLLMService(api_key="none", base_url=f"{WEBSOCKETS}/realtime", settings=settings)


async def realtime_tools():
    await answer(talker("scripted", output_modalities=["text"]), read_clock, text="It is noon.")


async def realtime_speech():
    for model in ("speech", "omni"):
        run_llm = frames.LLMRunFrame()
        await run(talker(model), run_llm, kind=frames.TTSAudioRawFrame, last=frames.TTSStoppedFrame)


run_features(llm, tools, responses, responses_over_a_websocket, tts, stt, realtime_tools, realtime_speech)
