"""The vllm engine resumes from a checkpoint with the same output as without an interruption."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.base import Checkpoint, Emission, EngineEvent, SamplingOptions, Task
from stagemesh.services.engines.prompts import RawPrompt
from stagemesh.services.engines.vllm import resume
from stagemesh.services.engines.vllm.engine import VllmEngine
from stagemesh.services.engines.vllm.features import EngineRequest, RequestPrompt
from stagemesh.services.engines.vllm.requests import CheckedParams
from stagemesh.services.engines.vllm.resume import remaining_params
from tests.engines.support import collect, text_logprobs_of, text_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]

MAX_TOKENS = 40
PROMPT = (20, 30, 40, 50)
GREEDY = SamplingOptions(temperature=0.0)
RANDOM = SamplingOptions(temperature=1.0)
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": RANDOM,
    "seeded, top-p and top-k": SamplingOptions(temperature=1.3, top_p=0.9, top_k=50),
    "seeded, repetition penalty": SamplingOptions(temperature=1.0, repetition_penalty=1.2),
}
END = 0
"""The tiny model's end-of-text token."""


def task(
    sampling: SamplingOptions = GREEDY,
    resume_from: Checkpoint | None = None,
    *,
    prompt: Sequence[int] = PROMPT,
    max_tokens: int = MAX_TOKENS,
) -> Task:
    return Task("r", 5, RawPrompt(prompt), sampling=replace(sampling, max_tokens=max_tokens), resume_from=resume_from)


def checkpoints(events: Iterable[EngineEvent]) -> list[Checkpoint]:
    return [event for event in events if isinstance(event, Checkpoint)]


async def collect_checkpoints(engine: VllmEngine, wanted: Task) -> list[EngineEvent]:
    """Returns a task's events with a checkpoint at nearly each token.

    Tries again if there are too few: vLLM joins outputs that this process is too slow to take.
    """
    for _ in range(5):
        whole = await collect(engine.submit(wanted))
        if len(checkpoints(whole)) > MAX_TOKENS // 2:
            break
    assert len(checkpoints(whole)) > MAX_TOKENS // 2, "the text must not end early"
    return whole


def index_of(events: list[EngineEvent], checkpoint: Checkpoint) -> int:
    return next(i for i, event in enumerate(events) if event is checkpoint)


async def assert_the_same_follows(
    engine: VllmEngine, sampling: SamplingOptions, whole: list[EngineEvent], checkpoint: Checkpoint
) -> None:
    rest = await collect(engine.submit(task(sampling, checkpoint)))
    assert text_of(rest) == text_of(whole[index_of(whole, checkpoint) + 1 :])
    assert rest[-1] == whole[-1]
    # Two tokens may arrive together and make one checkpoint.
    tokens = checkpoints(whole)[-1].token_ids
    for one in checkpoints(rest):
        shared = min(one.steps, len(tokens))
        assert one.token_ids[:shared] == tokens[:shared]


async def test_a_slow_request_has_a_checkpoint_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    request = EngineRequest(task(), "r", RequestPrompt(list(PROMPT)), CheckedParams())
    hook, steps = resume._Checkpoints(request, interval=4, interval_s=0.5), list[int]()
    for passed_s in (0.1, 0.3, 0.2, 0.1, 0.1, 0.6):
        now_s += passed_s
        request.sampled.append(7)
        steps += [each.steps for each in hook.observe(finished=False)]
    assert steps == [3, 4, 6], "after 0.6 s, after four tokens, and after another 0.7 s"


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
async def test_output_after_a_checkpoint_is_the_same(text_engine: VllmEngine, sampling: SamplingOptions) -> None:
    whole = await collect_checkpoints(text_engine, task(sampling))
    made = checkpoints(whole)
    for steps in (1, 17, MAX_TOKENS - 1):
        checkpoint = min(made, key=lambda one: abs(one.steps - steps))
        await assert_the_same_follows(text_engine, sampling, whole, checkpoint)


def made_no_text(event: EngineEvent) -> bool:
    return isinstance(event, Emission) and not event.packet.tensors["text"].size


async def test_text_resumes_within_a_character(text_engine: VllmEngine) -> None:
    whole = await collect_checkpoints(text_engine, task(RANDOM))
    within = [one for one in checkpoints(whole) if one.steps > 1 and made_no_text(whole[index_of(whole, one) - 1])]
    assert within, "some token must end within a character"
    for checkpoint in within:
        await assert_the_same_follows(text_engine, RANDOM, whole, checkpoint)


async def test_stop_text_is_found_across_the_checkpoint(text_engine: VllmEngine) -> None:
    text = text_of(await collect(text_engine.submit(task(RANDOM))))
    stop = text[len(text) // 2 :][:6]
    sampling = replace(RANDOM, stop=(stop, "never there at all"))
    whole = await collect(text_engine.submit(task(sampling)))
    assert text_of(whole) == text[: text.index(stop)]
    for checkpoint in checkpoints(whole)[-8:]:
        await assert_the_same_follows(text_engine, sampling, whole, checkpoint)


@pytest.mark.parametrize("stop", [(), ("never there at all",)], ids=["no stop text", "stop text"])
async def test_logprobs_of_the_text_resume_at_the_checkpoint(text_engine: VllmEngine, stop: tuple[str, ...]) -> None:
    sampling = replace(RANDOM, logprobs=1, stop=stop)
    whole = await collect_checkpoints(text_engine, task(sampling))
    expected = text_logprobs_of(whole)
    assert [each.position for each in expected] == sorted(each.position for each in expected)
    for checkpoint in checkpoints(whole)[::3]:
        rest = await collect(text_engine.submit(task(sampling, checkpoint)))
        made = [*text_logprobs_of(whole[: index_of(whole, checkpoint)]), *text_logprobs_of(rest)]
        for ours, first in zip(made, expected, strict=True):
            assert (ours.position, ours.sampled[:2]) == (first.position, first.sampled[:2])
            assert ours.sampled.logprob == pytest.approx(first.sampled.logprob, abs=1e-4)


async def test_checkpoint_with_damaged_logprobs_is_rejected(text_engine: VllmEngine) -> None:
    sampling = replace(RANDOM, logprobs=1)
    made = checkpoints(await collect_checkpoints(text_engine, task(sampling)))[0]
    damaged = replace(made, tensors={**made.tensors, "logprobs": made.tensors["logprobs"][1:]})
    error = await _rejected(text_engine, task(sampling, damaged))
    assert (error.reason, "damaged log-probabilities" in error.message) == ("INVALID_CHECKPOINT", True)


async def test_penalties_count_the_tokens_of_the_checkpoint(text_engine: VllmEngine) -> None:
    async def sampled(prompt: list[int], params: SamplingParams, name: str) -> list[int]:
        (rendered,) = text_engine.control.llm.renderer.render_cmpl([{"prompt_token_ids": prompt}])
        outputs = text_engine.control.llm.generate(rendered, params, name)
        return [token async for output in outputs for token in output.outputs[0].token_ids]

    plain = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, min_tokens=30, output_kind=RequestOutputKind.DELTA)
    params = plain.clone()
    params.presence_penalty, params.frequency_penalty = 0.4, 0.3
    whole = await sampled(list(PROMPT), params, "whole")
    assert whole != await sampled(list(PROMPT), plain, "plain"), "the penalties must matter"
    for count in (1, 17, 29, MAX_TOKENS - 1):
        rest = await sampled([*PROMPT, *whole[:count]], remaining_params(params, resumed=count), f"after {count}")
        assert rest == whole[count:]


async def test_resumed_requests_may_share_a_batch(text_engine: VllmEngine) -> None:
    whole = await collect_checkpoints(text_engine, task(RANDOM))
    async with asyncio.TaskGroup() as group:
        group.create_task(collect(text_engine.submit(task(RANDOM))))
        for checkpoint in checkpoints(whole)[::5]:
            group.create_task(assert_the_same_follows(text_engine, RANDOM, whole, checkpoint))


async def test_checkpoint_without_a_digest_is_accepted(text_engine: VllmEngine) -> None:
    whole = await collect_checkpoints(text_engine, task())
    made = checkpoints(whole)[4]
    rest = await collect(text_engine.submit(task(resume_from=Checkpoint(len(made.token_ids), made.token_ids))))
    assert text_of(rest) == text_of(whole[index_of(whole, made) + 1 :])


async def test_empty_checkpoint_starts_from_the_beginning(text_engine: VllmEngine) -> None:
    whole, again = [await collect(text_engine.submit(task(resume_from=one))) for one in (None, Checkpoint(0))]
    assert text_of(whole) == text_of(again)


async def _rejected(engine: VllmEngine, wrong: Task) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        await collect(engine.submit(wrong))
    assert engine.load().running == 0
    return caught.value


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (Checkpoint(1, (10**6,)), "token id 1000000, which is outside the model's vocabulary"),
        (Checkpoint(2, (10,)), "counts 2 steps and has 1 tokens"),
        (Checkpoint(2), "counts 2 steps and has 0 tokens"),
        (Checkpoint(MAX_TOKENS, (10,) * MAX_TOKENS), "already has 40 tokens and max_tokens is 40"),
        (Checkpoint(3, (10, END, 10)), "past its end: it contains the stop token 0"),
    ],
)
async def test_impossible_checkpoint_is_rejected(text_engine: VllmEngine, checkpoint: Checkpoint, message: str) -> None:
    assert message in (await _rejected(text_engine, task(resume_from=checkpoint))).message


async def test_checkpoint_of_another_prompt_is_rejected(text_engine: VllmEngine) -> None:
    made = checkpoints(await collect_checkpoints(text_engine, task()))[0]
    error = await _rejected(text_engine, task(resume_from=made, prompt=[21, 30, 40, 50]))
    assert (error.reason, "belongs to another prompt" in error.message) == ("INVALID_CHECKPOINT", True)


async def test_checkpoint_past_a_stop_text_is_rejected(text_engine: VllmEngine) -> None:
    (letter,) = text_engine.control.llm.get_tokenizer().encode("x")
    wrong = task(replace(GREEDY, stop=("xx",)), Checkpoint(3, (letter, letter, letter)))
    assert "its text contains the stop text 'xx'" in (await _rejected(text_engine, wrong)).message


async def test_rejected_checkpoint_does_not_affect_other_requests(text_engine: VllmEngine) -> None:
    whole = await collect_checkpoints(text_engine, task(RANDOM))
    async with aclosing(text_engine.submit(task(RANDOM))) as running:
        first = await anext(running)
        with pytest.raises(InvalidRequestError):
            await collect(text_engine.submit(task(resume_from=Checkpoint(2, (10, END)))))
        assert text_of([first, *await collect(running)]) == text_of(whole)
