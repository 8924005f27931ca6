/** Answers of one HTTP request each: images, and texts that are read aloud. */

import { chunks, events, request } from "./api.js";
import { decodePcm } from "./pcm.js";
import { Playback, openOutput } from "./playback.js";

const PREVIEWS = 3;

/** Answers each prompt by one request. `answer` is `drawImage` or `readAloud`. */
export class SingleAnswers {
  #answer;
  #model;
  #log;
  #onChange;
  #running = null;
  isListening = false;

  /** Calls `onChange` when `isBusy` may have changed. */
  constructor(answer, { model, log, onChange }) {
    this.#answer = answer;
    this.#model = model;
    this.#log = log;
    this.#onChange = onChange;
  }

  /** Whether an answer is being made or heard. */
  get isBusy() {
    return this.#running !== null;
  }

  /** Sends a prompt. Interrupts the answer before. */
  async send(text) {
    openOutput();
    this.interrupt();
    this.#log.addPrompt(text);
    const running = new AbortController();
    const view = this.#log.addAnswer();
    this.#running = running;
    this.#onChange();
    try {
      await this.#answer(this.#model, text, view, running.signal);
    } catch (error) {
      if (running.signal.aborted) view.note("Interrupted");
      else view.note(error.message, { isError: true });
    } finally {
      view.complete();
      if (this.#running === running) this.#running = null;
      this.#onChange();
    }
  }

  /** Stops the answer. */
  interrupt() {
    this.#running?.abort();
  }

  /** Stops the answer, as `interrupt` does: there is no conversation to keep. */
  async pause() {
    this.interrupt();
  }

  async close() {
    this.interrupt();
  }
}

/** Shows the image of a prompt, and its previews while it is made. */
export async function drawImage(model, prompt, view, signal) {
  const body = { model, prompt, stream: true, partial_images: PREVIEWS };
  for await (const event of events(await request("v1/images/generations", { body, signal }))) {
    const url = `data:image/${event.output_format};base64,${event.b64_json}`;
    view.showImage(url, { description: prompt, isPreview: event.type === "image_generation.partial_image" });
  }
}

/** Plays the speech of a text while it is made. */
export async function readAloud(model, text, view, signal) {
  const body = { model, input: text, response_format: "pcm" };
  const response = await request("v1/audio/speech", { body, signal });
  const playback = new Playback();
  signal.addEventListener("abort", () => playback.stop());
  view.follow(playback);
  try {
    let rest = new Uint8Array();
    for await (const chunk of chunks(response.body)) {
      const bytes = new Uint8Array([...rest, ...chunk]);
      const length = bytes.length - (bytes.length % 2);
      rest = bytes.slice(length);
      playback.add(decodePcm(bytes.subarray(0, length)));
    }
  } finally {
    playback.complete();
  }
  await playback.ended;
  signal.throwIfAborted();
}
