import { status } from "@grpc/grpc-js";
import type { StagemeshError } from "./errors.js";

const FIRST_PAUSE_S = 0.05;
const LONGEST_PAUSE_S = 2;
/** The codes with which a call ends if its connection breaks. */
const BROKEN: ReadonlySet<status> = new Set([status.UNAVAILABLE, status.CANCELLED, status.UNKNOWN, status.INTERNAL]);

/** The growing pauses between calls that continue each other. */
export class Pauses {
  #nextS = FIRST_PAUSE_S;

  /** Returns the number of seconds to wait after a failed call. */
  after({ retryAfterS }: StagemeshError): number {
    const pauseS = retryAfterS ?? this.#nextS;
    this.#nextS = Math.min(2 * this.#nextS, LONGEST_PAUSE_S);
    return pauseS;
  }

  /** Begins with short pauses again, because an orchestrator has answered. */
  reset(): void {
    this.#nextS = FIRST_PAUSE_S;
  }
}

/** Returns whether a call that ended with this error is repeated. `hasBegun`: it had an event other than queued. */
export function mayCallAgain(error: StagemeshError, hasBegun: boolean): boolean {
  const isBroken = error.reason === "" && BROKEN.has(error.code);
  if (isBroken || (error.code === status.UNAVAILABLE && error.reason === "NOT_RUNNING")) return true;
  return !hasBegun && (error.code === status.UNAVAILABLE || error.retryAfterS !== undefined);
}
