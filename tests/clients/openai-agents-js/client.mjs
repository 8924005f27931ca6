import assert from "node:assert/strict";

import { Agent, handoff, run, setOpenAIAPI, setTracingDisabled, tool } from "@openai/agents";
import { RealtimeAgent, RealtimeSession } from "@openai/agents/realtime";
import { z } from "zod";

import { features } from "./features.mjs";

setTracingDisabled(true); // Traces go to OpenAI's servers.

const model = "scripted";
const prompt = "What time is it?";
const schema = z.object({ zone: z.string(), hours: z.array(z.number()).nullable() });
const zones = [];
const clock = tool({
  name: "read_clock",
  description: "Reads a clock",
  parameters: schema,
  execute: ({ zone }) => void zones.push(zone) ?? "12:00",
});
const agent = (options) => new Agent({ name: "Clock", instructions: "Be brief.", model, ...options });

const apis = ["responses", "chat_completions"].map((api) => {
  const name = api === "responses" ? "" : "chat: ";
  const ask = (...given) => (setOpenAIAPI(api), run(...given));
  return {
    [`${name}text`]: async () => {
      const first = await ask(agent(), prompt);
      assert.equal(first.finalOutput, "Hello there.");
      const again = await ask(agent(), [...first.history, { role: "user", content: prompt }]);
      assert.equal(again.finalOutput, "Hello there.");
    },
    [`${name}stream`]: async () => {
      const stream = await ask(agent(), prompt, { stream: true });
      let text = "";
      for await (const piece of stream.toTextStream()) text += piece;
      assert.equal(text, "Hello there.");
    },
    [`${name}tools`]: async () => {
      assert.equal((await ask(agent({ tools: [clock] }), prompt)).finalOutput, "It is noon.");
      assert.equal(typeof zones.pop(), "string");
    },
    [`${name}required tools`]: async () => {
      const required = agent({ tools: [clock], modelSettings: { toolChoice: "required", parallelToolCalls: false } });
      assert.equal((await ask(required, prompt)).finalOutput, "It is noon.");
    },
    [`${name}handoff`]: async () => {
      const answer = await ask(agent({ handoffs: [handoff(agent({ name: "Other" }))] }), prompt);
      assert.deepEqual([answer.lastAgent.name, answer.finalOutput], ["Other", "It is noon."]);
    },
    [`${name}structured output`]: async () => {
      assert.equal(typeof (await ask(agent({ outputType: schema }), prompt)).finalOutput.zone, "string");
    },
  };
});

/** Returns the text or transcript of an answer of a realtime session, and the bytes of its audio. */
async function converse({ model, tools = [], config, until = "" }) {
  const url = `${process.env.OPENAI_BASE_URL.replace("http", "ws")}/realtime?model=${model}`;
  const talker = new RealtimeAgent({ name: "Clock", instructions: "Be brief.", tools });
  const session = new RealtimeSession(talker, { transport: "websocket", model, config });
  let audio = 0;
  session.on("audio", ({ data }) => (audio += data.byteLength));
  const answered = new Promise((resolve, reject) => {
    session.on("error", ({ error }) => reject(new Error(JSON.stringify(error))));
    session.on("agent_end", (_context, _agent, text) => text.includes(until) && resolve(text));
  });
  await session.connect({ apiKey: process.env.OPENAI_API_KEY, url });
  session.sendMessage(prompt);
  const text = await answered.finally(() => session.close());
  return { text, audio };
}

await features({
  ...Object.assign({}, ...apis),
  "realtime: tools": async () => {
    const config = { outputModalities: ["text"] };
    assert.equal((await converse({ model, tools: [clock], config, until: "noon" })).text, "It is noon.");
    assert.equal(typeof zones.pop(), "string");
  },
  "realtime: speech": async () => assert.ok((await converse({ model: "speech" })).audio > 10_000),
  "realtime: omni": async () => assert.ok((await converse({ model: "omni" })).audio > 0),
});
