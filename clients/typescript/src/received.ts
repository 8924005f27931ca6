import { FinishReason, type MessageDelta, type Output } from "./gen/stagemesh/v1/request.js";
import { type GenerateResponse, OutputPosition } from "./gen/stagemesh/v1/orchestrator.js";
import { unknownKind, unknownKindError } from "./protocol.js";

/** An event of a request, for example `{ $case: "output", value: {…} }`. */
export type GenerateEvent = NonNullable<GenerateResponse["event"]>;

/** The events of a request that have arrived. They say where the next call continues, and which events are repeated. */
export class Received {
  seed: bigint | undefined;
  readonly #steps = new Map<string, bigint>();
  readonly #ends = new Map<string, OutputPosition>();
  readonly #complete = new Set<string>();
  #generation = "";
  #isFinished = false;

  /** For each output of each choice, the end of its last part. */
  get positions(): OutputPosition[] {
    return [...this.#ends.values()];
  }

  /** The generation in which the request must continue. Empty if no output has arrived, because then any will do. */
  get generation(): string {
    return this.#ends.size > 0 ? this.#generation : "";
  }

  /** Records an event. Returns false if the caller has it already. */
  add(event: GenerateEvent): boolean {
    switch (event.$case) {
      case "queued":
        return this.seed === undefined;
      case "admitted": {
        const isFirst = this.seed === undefined;
        this.seed ??= event.value.seed;
        this.#generation = event.value.generation;
        return isFirst;
      }
      case "progress": {
        const { stage, progress, index } = event.value;
        const key = `${stage} ${index}`;
        const steps = progress?.engineSteps ?? 0n;
        if (steps <= (this.#steps.get(key) ?? -1n)) return false;
        this.#steps.set(key, steps);
        return true;
      }
      case "output":
        return this.#addOutput(event.value);
      case "finished": {
        const isFirst = !this.#isFinished;
        this.#isFinished = true;
        return isFirst;
      }
    }
  }

  #addOutput(output: Output): boolean {
    const { name, index } = output;
    const key = `${name} ${index}`;
    if (this.#complete.has(key)) return false;
    this.#ends.set(key, OutputPosition.create({ name, index, position: endOf(output) }));
    const reason = output.finish?.reason;
    if (reason !== undefined && reason !== FinishReason.CANCELLED && reason !== FinishReason.FAILED) {
      this.#complete.add(key);
    }
    return true;
  }
}

/** Returns the end of a part of an output, in the unit of `Output.position`. */
export function endOf(output: Output): bigint {
  return output.position + BigInt(lengthOf(output));
}

function lengthOf({ content }: Output): number {
  switch (content?.$case) {
    case undefined:
      return 0;
    case "text":
      return Buffer.byteLength(content.value);
    case "tokenIds":
      return content.value.ids.length;
    case "audio":
      return Number(content.value.samples?.shape[0] ?? 0n);
    case "image":
      return content.value.last ? 1 : 0;
    case "media":
      return content.value.data.length;
    case "file":
      return 1;
    case "tensor":
      return Number(content.value.shape[0] ?? 1n);
    case "message":
      return messageLengthOf(content.value);
  }
}

function messageLengthOf({ delta }: MessageDelta): number {
  if (delta === undefined) return 0;
  const text = delta.$case === "toolCall" ? delta.value.name + delta.value.arguments : delta.value;
  return Buffer.byteLength(text);
}

/** Returns the event of a response, or undefined if it can be ignored. Throws UNKNOWN_KIND if it needs a newer client. */
export function knownEvent(response: GenerateResponse): GenerateEvent | undefined {
  const { event } = response;
  const output = event?.$case === "output" ? event.value : undefined;
  if (event !== undefined && (output === undefined || output.content !== undefined || output.finish !== undefined)) {
    return event;
  }
  const kind = unknownKind(output ?? response);
  if (kind === undefined || response.ignorable) return undefined;
  throw unknownKindError("the orchestrator", output === undefined ? "GenerateResponse" : "Output", kind);
}
