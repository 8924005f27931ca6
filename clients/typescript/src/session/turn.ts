import { GenerateResponse, type OutputPosition } from "../gen/stagemesh/v1/orchestrator.js";
import { type GenerateEvent, knownEvent, Received } from "../received.js";

/** The answer to a turn, as far as a client has received it. */
export class ReceivedTurn {
  /** The number of the client's event that ended the input of the turn. 0 if it is open, or was detected. */
  lastEvent = 0n;
  /** The time in the audio of the session at which the turn ends, in seconds, if it was detected. */
  audioEndS: number | undefined;
  /** Whether the answer was interrupted. */
  isStopped = false;
  /** How much of each output the program has read, by name. */
  readonly heard = new Map<string, bigint>();
  /** The first audio output. Undefined if none has arrived. */
  audio: { readonly output: string; readonly sampleRateHz: number } | undefined;
  readonly #texts = new Map<string, string>();
  readonly #received = new Received();

  constructor(readonly number: bigint) {}

  /** How much of each output has arrived. */
  get positions(): OutputPosition[] {
    return this.#received.positions;
  }

  /** The generation in which the turn must continue. */
  get generation(): string {
    return this.#received.generation;
  }

  /** Returns the text of an output that has arrived. */
  text(output: string): string {
    return this.#texts.get(output) ?? "";
  }

  /** Returns the event of a response, or undefined if it has arrived before or can be ignored. Throws UNKNOWN_KIND. */
  take(response: GenerateResponse): GenerateEvent | undefined {
    const event = knownEvent(response);
    if (event === undefined || !this.#received.add(event)) return undefined;
    if (event.$case === "output") {
      const { name, content } = event.value;
      if (content?.$case === "text") this.#texts.set(name, this.text(name) + content.value);
      if (content?.$case === "audio") this.audio ??= { output: name, sampleRateHz: content.value.sampleRateHz };
    }
    return event;
  }
}
