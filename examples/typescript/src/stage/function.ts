import type { Input } from "stagemesh/v1/request";
import type { Signature } from "stagemesh/v1/signature";
import type { Packet, Value } from "./packets.js";

/** What a stage computes. */
export interface StageFunction {
  /** What it accepts and emits, which must equal the signature in the pipeline file. */
  readonly signature: Signature;
  /**
   * Processes one request. `packets` come from the edge that enters the stage; they are empty for a stage without one.
   * The same packets, options and seed must yield the same bytes, because a request may be repeated elsewhere.
   */
  run(packets: AsyncIterable<Packet>, task: Task): AsyncIterable<Packet>;
}

/** A request, as a function sees it. */
export interface Task {
  readonly requestId: string;
  readonly seed: bigint;
  /** All options of the signature, with their defaults. */
  readonly options: ReadonlyMap<string, Value>;
  /** The client's input. Set only for a stage without incoming edges. */
  readonly input: Input | undefined;
  /** Aborted when the request is stopped. */
  readonly signal: AbortSignal;
}
