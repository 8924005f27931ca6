/** Gapless playback of audio that arrives in parts. */

import { RATE_HZ } from "./pcm.js";

/** The time before the first sample, in which further parts may arrive, in seconds. */
const LEAD_S = 0.06;

let shared = null;

/**
 * Returns the audio context of the page, which plays at the rate of the gateway, so that parts join without a gap.
 *
 * Browsers let it play only if it is first called after a click or a key.
 */
export function openOutput() {
  shared ??= new AudioContext({ sampleRate: RATE_HZ });
  if (shared.state === "suspended") shared.resume();
  return shared;
}

/** The audio of one answer. Counts the samples that have been played. */
export class Playback {
  #context = openOutput();
  #parts = [];
  #end = 0;
  #stoppedAt = null;
  #isComplete = false;
  #settle = null;

  constructor() {
    /** Resolves when all audio has been played, or the playback was stopped. */
    this.ended = new Promise((resolve) => (this.#settle = resolve));
  }

  /** The number of samples that have arrived. */
  get received() {
    return this.#parts.reduce((sum, part) => sum + part.length, 0);
  }

  /** The number of samples that the listener has heard. */
  get heard() {
    if (this.#stoppedAt !== null) return this.#stoppedAt;
    const latency = this.#context.outputLatency || this.#context.baseLatency || 0;
    const now = Math.floor((this.#context.currentTime - latency) * RATE_HZ);
    return this.#parts.reduce((sum, part) => sum + Math.min(Math.max(now - part.start, 0), part.length), 0);
  }

  /** Whether audio is being played, or more will arrive. */
  get isRunning() {
    return this.#stoppedAt === null;
  }

  /** Plays samples directly after the ones before them, or soon if those have ended. */
  add(samples) {
    if (!this.isRunning || !samples.length) return;
    const buffer = new AudioBuffer({ length: samples.length, numberOfChannels: 1, sampleRate: RATE_HZ });
    buffer.copyToChannel(samples, 0);
    const source = new AudioBufferSourceNode(this.#context, { buffer });
    source.connect(this.#context.destination);
    const now = Math.ceil(this.#context.currentTime * RATE_HZ);
    // Counted in samples, so that no rounding separates two parts.
    const start = this.#end > now ? this.#end : now + Math.ceil(LEAD_S * RATE_HZ);
    source.start(start / RATE_HZ);
    this.#end = start + samples.length;
    const part = { source, start, length: samples.length };
    this.#parts.push(part);
    source.addEventListener("ended", () => {
      // Its samples are not needed any more.
      part.source = null;
      this.#endIfPlayed();
    });
  }

  /** Declares that no more audio will arrive. */
  complete() {
    this.#isComplete = true;
    this.#endIfPlayed();
  }

  /** Stops the playback. Returns the number of samples that the listener has heard. */
  stop() {
    if (this.isRunning) this.#finish(this.heard);
    for (const part of this.#parts) part.source?.stop();
    return this.#stoppedAt;
  }

  #endIfPlayed() {
    const isPlayed = this.#isComplete && this.#parts.every((part) => part.source === null);
    if (this.isRunning && isPlayed) this.#finish(this.received);
  }

  #finish(heard) {
    this.#stoppedAt = heard;
    this.#settle();
  }
}
