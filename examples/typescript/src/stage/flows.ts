import { status } from "@grpc/grpc-js";
import type { StagemeshError } from "stagemesh/errors";
import type { EdgeKey } from "stagemesh/v1/chunk";

/** For how long a lost end of a flow may stay away, and for how long a failed flow waits for RebindStep. */
export const LOST_PEER_MS = 15_000;

/** The reason of a flow's error if the consumer's step has failed, so that no other consumer can help. */
export const NOT_READ = "NOT_READ";

/** Returns a text that identifies a flow. */
export function idOf(key: EdgeKey): string {
  return `${key.requestId} ${key.edge} ${key.attempt}`;
}

/** Returns whether a flow that failed with this error may continue with another replica at its other end. */
export function isRecoverable(error: StagemeshError): boolean {
  if (["UNKNOWN_FLOW", "STALE_ATTEMPT", "STALE_INCARNATION"].includes(error.reason)) return true;
  return error.code === status.UNAVAILABLE || (error.code === status.CANCELLED && error.reason !== NOT_READ);
}

/** Wakes the tasks that wait for a change. */
export class Signal {
  #waiting: (() => void)[] = [];

  fire(): void {
    const waiting = this.#waiting;
    this.#waiting = [];
    for (const wake of waiting) wake();
  }

  /** Resolves at the next `fire`, or after `timeoutMs`. Resolves to false if the time has passed. */
  next(timeoutMs?: number): Promise<boolean> {
    return new Promise((resolve) => {
      const timer = timeoutMs === undefined ? undefined : setTimeout(() => resolve(false), Math.max(0, timeoutMs));
      this.#waiting.push(() => {
        clearTimeout(timer);
        resolve(true);
      });
    });
  }
}

/** A map that forgets its oldest entries. */
export class RecentMap<K, V> extends Map<K, V> {
  constructor(readonly capacity: number) {
    super();
  }

  override set(key: K, value: V): this {
    this.delete(key);
    super.set(key, value);
    const oldest = this.keys().next();
    if (this.size > this.capacity && !oldest.done) this.delete(oldest.value);
    return this;
  }
}
