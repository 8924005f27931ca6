import assert from "node:assert/strict";

import { openai } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  ToolLoopAgent,
  experimental_generateSpeech as generateSpeech,
  experimental_transcribe as transcribe,
  generateImage,
  generateObject,
  generateText,
  stepCountIs,
  streamText,
  tool,
} from "ai";
import { z } from "zod";

import { features } from "./features.mjs";

const baseURL = process.env.OPENAI_BASE_URL;
const compatible = createOpenAICompatible({ name: "stagemesh", baseURL, supportsStructuredOutputs: true });
const providers = { "": openai, "chat: ": openai.chat, "compatible: ": compatible };
const prompt = "What time is it?";
const schema = z.object({ zone: z.string(), hours: z.array(z.number()) });
const tools = { read_clock: tool({ description: "Reads a clock", inputSchema: schema, execute: () => "12:00" }) };

const table = Object.entries(providers).map(([name, provider]) => {
  const model = provider("scripted");
  return {
    [`${name}text`]: async () => assert.equal((await generateText({ model, prompt })).text, "Hello there."),
    [`${name}stream`]: async () => {
      const stream = streamText({ model, prompt, onError: ({ error }) => assert.fail(error) });
      assert.equal(await stream.text, "Hello there.");
    },
    [`${name}tools`]: async () => {
      const answer = await generateText({ model, prompt, tools, stopWhen: stepCountIs(2) });
      assert.equal(answer.text, "It is noon.");
      assert.equal(typeof answer.steps[0].toolCalls[0].input.zone, "string");
    },
    [`${name}agent`]: async () => {
      const stream = await new ToolLoopAgent({ model, tools, instructions: "Be brief." }).stream({ prompt });
      assert.equal(await stream.text, "It is noon.");
    },
    [`${name}structured output`]: async () => {
      assert.equal(typeof (await generateObject({ model, prompt, schema })).object.zone, "string");
    },
  };
});

async function speak() {
  const speech = await generateSpeech({ model: openai.speech("speech"), text: "The sea is calm." });
  return speech.audio.uint8Array;
}

await features({
  ...Object.assign({}, ...table),
  speech: async () => assert.ok((await speak()).length > 1_000),
  transcription: async () => {
    const transcript = await transcribe({ model: openai.transcription("omni"), audio: await speak() });
    assert.equal(typeof transcript.text, "string");
  },
  images: async () => {
    const { image } = await generateImage({ model: openai.image("digits"), prompt: "the digit seven" });
    assert.equal(image.mediaType, "image/png");
  },
  "compatible: reasoning": async () => {
    const stream = streamText({ model: compatible("scripted"), prompt: "REASON, please." });
    assert.ok(await stream.reasoningText);
  },
  "compatible: images": async () => {
    const { image } = await generateImage({ model: compatible.imageModel("digits"), prompt: "the digit seven" });
    assert.equal(image.mediaType, "image/png");
  },
});
