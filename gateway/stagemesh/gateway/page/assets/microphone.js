/** The microphone, as PCM at the rate of the gateway. */

import { ApiError } from "./api.js";
import { RATE_HZ } from "./pcm.js";

/** Returns why the page cannot use a microphone, or null if it can. */
export function missingMicrophone() {
  if (!isSecureContext) return "Browsers allow the microphone only over HTTPS or from localhost";
  return navigator.mediaDevices?.getUserMedia ? null : "This browser has no microphone";
}

/** A recording. Calls `onPcm` with the bytes of every 40 ms until it is closed. */
export class Microphone {
  #stream = null;
  #context = null;
  #node = null;

  /** Asks for the microphone, and begins. Throws ApiError if the user or the system refuses it. */
  async open(onPcm) {
    try {
      const audio = { channelCount: 1, echoCancellation: true, noiseSuppression: true };
      this.#stream = await navigator.mediaDevices.getUserMedia({ audio });
    } catch (error) {
      throw new ApiError(`The microphone cannot be used (${error.message}). Allow it in the browser, then try again.`);
    }
    const source = this.#connect();
    await this.#context.audioWorklet.addModule(new URL("recorder-worklet.js", import.meta.url));
    this.#node = new AudioWorkletNode(this.#context, "recorder", { numberOfOutputs: 0 });
    this.#node.port.addEventListener("message", ({ data }) => onPcm(new Uint8Array(data)));
    this.#node.port.start();
    source.connect(this.#node);
  }

  /** Ends the recording, and releases the microphone. */
  async close() {
    this.#stream?.getTracks().forEach((track) => track.stop());
    this.#node?.disconnect();
    this.#node?.port.close();
    await this.#context?.close();
  }

  #connect() {
    this.#context = new AudioContext({ sampleRate: RATE_HZ });
    try {
      return this.#context.createMediaStreamSource(this.#stream);
    } catch {
      // Firefox reads a microphone only at its own rate. The worklet converts it.
      this.#context.close();
      this.#context = new AudioContext();
      return this.#context.createMediaStreamSource(this.#stream);
    }
  }
}
