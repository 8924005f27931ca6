/** Converts the input to signed 16-bit samples at 24,000 Hz, and posts them in blocks of 40 ms. */

const RATE_HZ = 24000;
const BLOCK = 960;

class Recorder extends AudioWorkletProcessor {
  #step = RATE_HZ / sampleRate;
  #position = 0;
  #sum = 0;
  #weight = 0;
  #block = new DataView(new ArrayBuffer(2 * BLOCK));
  #count = 0;

  process([[channel]]) {
    for (const sample of channel ?? []) this.#push(sample);
    return true;
  }

  /** Each sample of the output is the mean of the input over its time. */
  #push(sample) {
    const rest = 1 - this.#position;
    if (this.#step < rest) {
      this.#add(sample, this.#step);
      this.#position += this.#step;
      return;
    }
    this.#add(sample, rest);
    this.#emit();
    this.#position = this.#step - rest;
    this.#add(sample, this.#position);
  }

  #add(sample, weight) {
    this.#sum += sample * weight;
    this.#weight += weight;
  }

  #emit() {
    const mean = Math.max(-1, Math.min(1, this.#sum / this.#weight));
    this.#sum = this.#weight = 0;
    this.#block.setInt16(2 * this.#count++, Math.round(mean * 32767), true);
    if (this.#count === BLOCK) {
      this.port.postMessage(this.#block.buffer.slice(0));
      this.#count = 0;
    }
  }
}

registerProcessor("recorder", Recorder);
