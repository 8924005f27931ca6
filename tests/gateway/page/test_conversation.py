"""Prompts on the page: answers that are read, heard, seen and interrupted."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.async_api import Page, expect

from stagemesh.common.errors import InternalError, OverloadedError
from stagemesh.v1.orchestrator_pb2 import GenerateResponse
from stagemesh.v1.request_pb2 import Media, Output
from stagemesh.v1.signature_pb2 import Signature
from tests.client import scripted_sessions
from tests.client.scripted import Pause, Script, Talk, admitted, ended, finished, served
from tests.gateway.making import describe, known_callers, serving
from tests.gateway.page.visiting import answer, samples, send, visiting
from tests.gateway.talking import RATE_HZ, messages, said, spoken, wav_samples
from tests.orchestrator.mesh import poll
from tests.pictures import encoded_image

pytestmark = pytest.mark.asyncio(loop_scope="session")

WORDS = [f"word{number} " for number in range(200)]
"""The words of a long answer. Each takes a tenth of a second."""


def image(number: int, *, preview: bool) -> GenerateResponse:
    """Returns a whole image, which has `number` as its width."""
    data = encoded_image(Image.new("RGB", (number, 8), (200, 60, 90)))
    media = Media(media_type="image/png", data=data, last=True, preview=preview)
    return GenerateResponse(output=Output(name="image", image=media))


async def test_an_answer_is_read_and_heard_without_gaps(page: Page) -> None:
    async with visiting(page, spoken("The ", "sea ", "is ", "calm.")) as orchestrator:
        await send(page, "How is the sea?")
        await expect(page.get_by_role("article", name="You")).to_have_text("How is the sea?")
        await expect(answer(page).locator(".text")).to_have_text("The sea is calm.")
        await expect(answer(page).locator(".heard")).to_have_attribute("data-state", "ended")
        length = 4 * RATE_HZ // 10
        assert [await samples(page, name) for name in ("heard", "received")] == [length, length]

        async def is_heard() -> bool:
            return bool(await page.evaluate("heardRun") == length)

        await poll(is_heard, until=bool, timeout_s=40)
        await expect(answer(page)).to_have_attribute("aria-busy", "false")
        await expect(page.get_by_role("button", name="Interrupt")).to_be_hidden()
        assert messages(orchestrator) == [("user", "How is the sea?")]


@pytest.mark.parametrize("is_complete", [True, False], ids=["complete", "running"])
@pytest.mark.parametrize("key", ["Escape", None], ids=["key", "button"])
async def test_an_interrupted_answer_keeps_what_was_heard(page: Page, key: str | None, is_complete: bool) -> None:
    end = [ended("text"), ended("audio"), finished()] if is_complete else [Pause.FOREVER]
    script: Script = [admitted(), *said(*WORDS), *end]
    async with visiting(page, script, spoken("Yes.")) as orchestrator:
        await send(page, "Talk")
        await expect(answer(page).locator(".text")).to_contain_text(WORDS[-1].strip())

        async def is_heard() -> bool:
            return await samples(page, "heard") > RATE_HZ // 2

        await poll(is_heard, until=bool, timeout_s=40)
        await (page.keyboard.press(key) if key else page.get_by_role("button", name="Interrupt").click())
        await expect(answer(page).locator(".heard")).to_have_attribute("data-state", "ended")
        await expect(answer(page).get_by_text("Interrupted")).to_be_visible()
        await expect(answer(page).locator(".text")).not_to_contain_text(WORDS[-1].strip())
        heard = await samples(page, "heard")
        assert RATE_HZ // 2 < heard < await samples(page, "received")
        text = await answer(page).locator(".text").inner_text()
        assert "".join(WORDS).startswith(text)
        assert len(text) / len("".join(WORDS)) == pytest.approx(heard / (len(WORDS) * RATE_HZ // 10), abs=0.02)

        await send(page, "Go on")
        await expect(answer(page).locator(".text")).to_have_text("Yes.")
        assert messages(orchestrator) == [("user", "Talk"), ("assistant", text.strip()), ("user", "Go on")]


async def test_an_answer_interrupted_before_its_sound_is_forgotten(page: Page) -> None:
    text_only: Script = [admitted(), next(iter(said("Well, "))), Pause.FOREVER]
    async with visiting(page, text_only, spoken("Yes.")) as orchestrator:
        await send(page, "Talk")
        await expect(answer(page).locator(".text")).to_have_text("Well, ")
        await send(page, "Stop")
        await expect(answer(page).locator(".text")).to_have_text("Yes.")
        assert messages(orchestrator) == [("user", "Talk"), ("user", "Stop")]


async def test_a_spoken_prompt_reaches_the_pipeline(page: Page) -> None:
    async with visiting(page, spoken("Yes.")) as orchestrator:
        speak = page.get_by_role("button", name="Speak")
        recorded = page.expect_websocket()
        async with recorded as opened:
            await speak.click()
        await expect(speak).to_have_attribute("aria-pressed", "true")
        socket = await opened.value
        for _ in range(30):
            await socket.wait_for_event("framesent", predicate=lambda frame: "audio_buffer.append" in str(frame))
        await speak.click()
        await expect(answer(page).locator(".text")).to_have_text("Yes.")
        await expect(page.get_by_role("article", name="You")).to_contain_text("Spoken prompt, ")
        (message,) = orchestrator.requests[0].input.conversation.messages
        heard = wav_samples(message.parts[0])
        assert len(heard) >= 30 * RATE_HZ // 25
        # Chromium's microphone beeps twice a second.
        assert np.abs(heard.astype(np.int32)).max() > 1000


async def test_detected_speech_interrupts_and_is_answered(page: Page) -> None:
    talk: Talk = [
        scripted_sessions.opened(limit=64 << 20),
        "append",
        *scripted_sessions.detected(1, 0.0, 0.05),
        *["append"] * 30,
        *scripted_sessions.detected(2, 0.2, 0.25),
        Pause.FOREVER,
    ]
    async with visiting(page, [admitted(), *said(*WORDS), Pause.FOREVER], spoken("Yes."), talks=[talk]):
        await page.get_by_role("button", name="Speak").click()
        answers = page.get_by_role("article", name="Answer")
        await expect(answers).to_have_count(2)
        await expect(answers.first.get_by_text("Interrupted")).to_be_visible()
        await expect(answers.first.locator(".text")).not_to_contain_text(WORDS[-1].strip())
        await expect(answers.last.locator(".text")).to_have_text("Yes.")
        await expect(page.get_by_role("button", name="Speak")).to_have_attribute("aria-pressed", "true")


async def test_an_image_follows_its_previews(page: Page) -> None:
    script: Script = [admitted(), *(image(number, preview=number < 4) for number in (2, 3, 4)), finished()]
    async with visiting(page, script, outputs=["image"]):
        await send(page, "a red square")
        shown = answer(page).get_by_role("img", name="a red square")
        await expect(shown).to_have_attribute("data-shown", "3")
        await expect(shown).to_have_js_property("naturalWidth", 4)
        await expect(answer(page)).to_have_attribute("aria-busy", "false")


async def test_an_interrupted_image_keeps_its_preview(page: Page) -> None:
    async with visiting(page, [admitted(), image(2, preview=True), Pause.FOREVER], outputs=["image"]) as orchestrator:
        await send(page, "a red square")
        await expect(answer(page).get_by_role("img", name="Preview: a red square")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(answer(page).get_by_text("Interrupted")).to_be_visible()
        await orchestrator.hung_up.wait()


async def test_a_conversation_continues_after_an_image(page: Page) -> None:
    drawn: Script = [admitted(), image(4, preview=False), finished()]
    async with visiting(page, spoken("Red."), drawn, spoken("Yes."), outputs=["text", "image"]) as orchestrator:
        await send(page, "Which color?")
        await expect(answer(page).locator(".text")).to_have_text("Red.")
        await page.get_by_text("Image", exact=True).click()
        await send(page, "a red square")
        await expect(answer(page).get_by_role("img")).to_have_js_property("naturalWidth", 4)
        await page.get_by_text("Talk", exact=True).click()
        await send(page, "Really?")
        await expect(answer(page).locator(".text")).to_have_text("Yes.")
        assert messages(orchestrator) == [("user", "Which color?"), ("assistant", "Red."), ("user", "Really?")]


async def test_another_model_begins_another_conversation(page: Page) -> None:
    async with served() as first, served() as second:
        for orchestrator, name in ((first, "p"), (second, "q")):
            describe(orchestrator, "text", pipeline=name, signature=Signature(media=True))
            orchestrator.scripts.append(spoken(f"I am {name}."))
        async with serving(first.endpoint, second.endpoint) as address:
            await page.goto(f"http://{address}/")
            for name in ("p", "q"):
                await page.get_by_label("Model").select_option(name)
                await expect(page.get_by_role("article")).to_have_count(0)
                await send(page, "Who are you?")
                await expect(answer(page).locator(".text")).to_have_text(f"I am {name}.")
            assert messages(second) == [("user", "Who are you?")]
            await page.close()


async def test_a_speech_that_breaks_off_says_so(page: Page) -> None:
    script: Script = [admitted(), *list(said("one "))[1:], InternalError("the stage is lost")]
    async with visiting(page, script, outputs=["audio"]):
        await send(page, "The sea is calm.")
        await expect(answer(page).locator(".error")).to_contain_text("broke off. Try again")


async def test_a_text_is_read_aloud(page: Page) -> None:
    async with visiting(page, spoken("ignored"), outputs=["audio"]):
        await send(page, "The sea is calm.")
        await expect(answer(page).locator(".heard")).to_have_attribute("data-state", "ended")
        assert await samples(page, "heard") == RATE_HZ // 10
        await expect(answer(page)).to_have_attribute("aria-busy", "false")


@pytest.mark.parametrize("output", ["text", "image"])
async def test_a_failed_answer_says_why(page: Page, output: str) -> None:
    script: Script = [OverloadedError("the pipeline is full; retry later", reason="OVERLOADED", retry_after_s=2)]
    async with visiting(page, script, outputs=[output]):
        await send(page, "hello")
        await expect(answer(page).locator(".error")).to_contain_text("the pipeline is full; retry later")
        await expect(page.get_by_role("button", name="Interrupt")).to_be_hidden()


async def test_a_pipeline_that_the_page_cannot_show_is_an_error(page: Page) -> None:
    async with visiting(page, outputs=[]):
        await expect(page.get_by_role("alert")).to_contain_text("no text, image or audio output")
        await expect(page.get_by_label("Prompt", exact=True)).to_be_disabled()


async def test_a_gateway_with_tokens_asks_for_one(page: Page, tmp_path: Path) -> None:
    with known_callers(tmp_path, {"secret": "ada"}) as (checker, clients):
        async with visiting(page, spoken("Hello, Ada."), tokens=checker, tls=clients):
            field = page.get_by_label("This gateway needs a token")
            await expect(field).to_be_focused()
            await expect(page.get_by_role("alert")).to_be_hidden()
            await field.fill("wrong")
            await field.press("Enter")
            await expect(page.get_by_role("alert")).to_contain_text("unknown")
            await field.fill("secret")
            await page.get_by_role("button", name="Use token").click()
            await expect(field).to_be_hidden()
            await send(page, "hello")
            await expect(answer(page).locator(".text")).to_have_text("Hello, Ada.")
            await page.reload()
            await expect(page.get_by_label("Model")).to_have_value("p")
            assert await page.evaluate("localStorage.length") == 0
            await page.get_by_role("button", name="Forget token").click()
            await expect(field).to_be_visible()
