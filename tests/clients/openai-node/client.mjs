import assert from "node:assert/strict";
import net from "node:net";

import OpenAI, { toFile } from "openai";
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { OpenAIRealtimeWS } from "openai/realtime/ws";
import { z } from "zod";

import { features } from "./features.mjs";

const ai = new OpenAI();
const model = "scripted";
const Time = z.object({ zone: z.string(), hours: z.array(z.number()).nullable() });
const messages = [{ role: "user", content: "What time is it?" }];
const clock = { name: "read_clock", parameters: Time };

async function speak() {
  const sentence = { input: "The sea is calm.", voice: "alloy", response_format: "wav" };
  const speech = await ai.audio.speech.create({ model: "speech", ...sentence });
  return Buffer.from(await speech.arrayBuffer());
}

await features({
  models: async () => assert.ok((await ai.models.list()).data.some(({ id }) => id === model)),
  chat: async () => {
    const first = await ai.chat.completions.create({ model, messages });
    const history = [...messages, first.choices[0].message, ...messages];
    const second = await ai.chat.completions.create({ model, messages: history });
    assert.equal(second.choices[0].message.content, "Hello there.");
  },
  stream: async () => {
    const stream = ai.chat.completions.stream({ model, messages, stream_options: { include_usage: true } });
    assert.equal(await stream.finalContent(), "Hello there.");
    assert.ok((await stream.totalUsage()).completion_tokens > 0);
  },
  tools: async () => {
    const zones = [];
    const tool = zodFunction({ ...clock, function: ({ zone }) => void zones.push(zone) ?? "12:00" });
    const whole = ai.chat.completions.runTools({ model, messages, tools: [tool] });
    assert.equal(await whole.finalContent(), "It is noon.");
    const stream = ai.chat.completions.runTools({ model, messages, tools: [tool], stream: true });
    assert.equal(await stream.finalContent(), "It is noon.");
    assert.deepEqual(zones.map((zone) => typeof zone), ["string", "string"]);
  },
  "structured output": async () => {
    const response_format = zodResponseFormat(Time, "time");
    const answer = await ai.chat.completions.parse({ model, messages, response_format });
    assert.equal(typeof answer.choices[0].message.parsed.zone, "string");
  },
  responses: async () => {
    const first = await ai.responses.create({ model, input: "What time is it?" });
    assert.equal(first.output_text, "Hello there.");
    const stream = ai.responses.stream({ model, input: "Again.", previous_response_id: first.id });
    assert.equal((await stream.finalResponse()).output_text, "Hello there.");
  },
  "responses: tools": async () => {
    const called = await ai.responses.parse({ model, input: messages, tools: [zodResponsesFunction(clock)] });
    const call = called.output.find(({ type }) => type === "function_call");
    assert.equal(typeof call.parsed_arguments.zone, "string");
    const result = { type: "function_call_output", call_id: call.call_id, output: "12:00" };
    const answer = await ai.responses.create({ model, input: [...messages, ...called.output, result] });
    assert.equal(answer.output_text, "It is noon.");
  },
  "responses: structured output": async () => {
    const answer = await ai.responses.parse({ model, input: messages, text: { format: zodTextFormat(Time, "time") } });
    assert.equal(typeof answer.output_parsed.zone, "string");
  },
  speech: async () => assert.ok((await speak()).length > 10_000),
  transcription: async () => {
    const file = await toFile(await speak(), "speech.wav");
    assert.equal(typeof (await ai.audio.transcriptions.create({ model: "omni", file })).text, "string");
  },
  images: async () => {
    const image = await ai.images.generate({ model: "digits", prompt: "the digit seven" });
    assert.ok(image.data[0].b64_json.length > 100);
  },
  // The client opens wss URLs alone. Its option for sockets of its own makes this one without TLS.
  realtime: async () => {
    const socket = new OpenAIRealtimeWS({ model, options: { createConnection: (to) => net.connect(to) } }, ai);
    const text = await new Promise((resolve, reject) => {
      let written = "";
      socket.on("error", reject);
      socket.on("session.created", () => {
        const content = [{ type: "input_text", text: "What time is it?" }];
        socket.send({ type: "conversation.item.create", item: { type: "message", role: "user", content } });
        socket.send({ type: "response.create" });
      });
      socket.on("response.output_text.delta", ({ delta }) => (written += delta));
      socket.on("response.done", () => resolve(written));
    });
    socket.close();
    assert.equal(text, "Hello there.");
  },
});
