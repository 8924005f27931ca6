import { ConverseRequest, type InputAppend } from "../gen/stagemesh/v1/orchestrator.js";
import { divide, durationOf, sizeOf } from "./pieces.js";

/** The content of an event of a client. */
export type SentEvent = NonNullable<ConverseRequest["event"]>;

interface Kept {
  readonly seq: bigint;
  /** The content, or undefined if it was withdrawn. */
  event: SentEvent | undefined;
  /** The number of bytes for which the event counts at the current orchestrator. */
  sizeBytes: number;
  /** The duration of the event's audio at the current orchestrator, in seconds. */
  durationS: number;
}

/**
 * The events of a session after the turns that have ended, numbered without gaps, and the credit of their pieces.
 *
 * An event that must not have an effect again is withdrawn: it keeps its number and loses its content. The session
 * rejects such an event.
 */
export class EventLog {
  /** The number of the last event. */
  last = 0n;
  /** The number of the last event that a session has handled, as far as it was reported. */
  accepted = 0n;
  /** The number of the last event that was sent in the current call. */
  sent = 0n;
  /** Whether the current call can send events. */
  isAttached = false;
  /** The time in the audio of the session at which the audio begins that the current orchestrator has received. */
  restoredAtS = 0;
  /** The duration of the audio that was appended in the session, in seconds. */
  audioS = 0;
  #kept: Kept[] = [];
  /** The time in the audio of the session at which the kept events begin, in seconds. */
  #keptFromS = 0;
  /** The number of bytes of the events up to `sent` that count against the limit. */
  #sentBytes = 0;
  #limitBytes = 0;

  /** Whether an event waits to be sent. */
  get hasUnsent(): boolean {
    return this.sent < this.last;
  }

  /** The duration of the kept audio in seconds. */
  get keptS(): number {
    return this.audioS - this.#keptFromS;
  }

  /** Returns whether a further piece could be sent now. */
  hasCredit(piece: InputAppend): boolean {
    const waiting = this.#after(this.sent).reduce((total, { sizeBytes }) => total + sizeBytes, 0);
    return this.isAttached && this.#sentBytes + waiting + sizeOf(piece) <= this.#limitBytes;
  }

  /** Adds an event, and returns its number. */
  add(event: SentEvent): bigint {
    this.last += 1n;
    const piece = event.$case === "append" ? event.value : undefined;
    const durationS = piece ? durationOf(piece) : 0;
    this.#kept.push({ seq: this.last, event, sizeBytes: piece ? sizeOf(piece) : 0, durationS });
    this.audioS += durationS;
    return this.last;
  }

  /** Returns the next event to send, or undefined if there is none, or if it must wait for credit. */
  next(): ConverseRequest | undefined {
    const kept = this.isAttached ? this.#find(this.sent + 1n) : undefined;
    if (kept === undefined || (kept.sizeBytes > 0 && this.#sentBytes + kept.sizeBytes > this.#limitBytes)) {
      return undefined;
    }
    this.sent += 1n;
    this.#sentBytes += kept.sizeBytes;
    return ConverseRequest.create({ seq: kept.seq, event: kept.event });
  }

  /** Records how many bytes the session accepts in total, and which event it has handled last. */
  grant(limitBytes: bigint, accepted: bigint): void {
    this.#limitBytes = Math.max(this.#limitBytes, Number(limitBytes));
    if (accepted > this.accepted) this.accepted = accepted;
  }

  /** Continues after the event `accepted` at an orchestrator that knows the session. */
  attach(limitBytes: bigint, accepted: bigint): void {
    for (const { seq, sizeBytes } of this.#after(accepted)) if (seq <= this.sent) this.#sentBytes -= sizeBytes;
    this.sent = accepted;
    this.#limitBytes = Number(limitBytes);
    this.isAttached = true;
    if (accepted > this.accepted) this.accepted = accepted;
  }

  /** Begins with the first kept event at an orchestrator that does not know the session. */
  restart(limitBytes: bigint): void {
    this.sent = this.#first - 1n;
    this.#sentBytes = 0;
    this.#limitBytes = Number(limitBytes);
    this.restoredAtS = this.#keptFromS;
    this.isAttached = true;
    for (const kept of this.#kept) {
      if (kept.event?.$case !== "append") [kept.sizeBytes, kept.durationS] = [0, 0];
    }
  }

  /** Returns whether an event is kept and was not withdrawn. */
  hasContent(seq: bigint): boolean {
    return this.#find(seq)?.event !== undefined;
  }

  /** Withdraws an event that the session has rejected. Returns whether it appended a piece. */
  reject(seq: bigint): boolean {
    const kept = this.#find(seq);
    if (kept === undefined) return false;
    if (seq <= this.sent) this.#sentBytes -= kept.sizeBytes;
    const isPiece = kept.event?.$case === "append";
    [kept.event, kept.sizeBytes, kept.durationS] = [undefined, 0, 0];
    return isPiece;
  }

  /** Withdraws an event that has had its effect. Does nothing if it is not kept. */
  withdraw(seq: bigint): void {
    const kept = this.#find(seq);
    if (kept !== undefined) kept.event = undefined;
  }

  /** Withdraws the pieces whose numbers are between two numbers. */
  clear(after: bigint, before: bigint): void {
    for (const kept of this.#after(after)) {
      if (kept.event?.$case === "append" && kept.seq < before) kept.event = undefined;
    }
  }

  /** Drops audio that the session has handled and that ends before a time in the audio of the session. */
  forgetAudio(beforeS: number): void {
    let atS = this.#keptFromS;
    for (const kept of this.#kept) {
      atS += kept.durationS;
      if (atS > beforeS || kept.seq > this.accepted) break;
      if (kept.durationS > 0) kept.event = undefined;
    }
    while (this.#kept[0] && this.#kept[0].event?.$case !== "append" && this.#first <= this.accepted) this.#shift();
  }

  /** Drops the events up to the number `last`. Returns the pieces among them. */
  endTurn(last: bigint): InputAppend[] {
    const pieces: InputAppend[] = [];
    while (this.#kept.length > 0 && this.#first <= last) pieces.push(...this.#shift());
    return pieces;
  }

  /**
   * Drops the pieces before a time in the audio of the session, and returns them. A piece that contains this time is
   * divided. Its rest keeps its number.
   */
  endDetectedTurn(audioEndS: number): InputAppend[] {
    const pieces: InputAppend[] = [];
    while (this.#kept[0] && this.#keptFromS + this.#kept[0].durationS <= audioEndS) pieces.push(...this.#shift());
    const [first] = this.#kept;
    if (first?.event?.$case === "append" && this.#keptFromS < audioEndS) {
      const [head, rest] = divide(first.event.value, audioEndS - this.#keptFromS);
      pieces.push(head);
      first.event = { $case: "append", value: rest };
      first.durationS = durationOf(rest);
      this.#keptFromS += durationOf(head);
    }
    return pieces;
  }

  get #first(): bigint {
    return this.last + 1n - BigInt(this.#kept.length);
  }

  #find(seq: bigint): Kept | undefined {
    return seq < this.#first ? undefined : this.#kept[Number(seq - this.#first)];
  }

  #after(seq: bigint): Kept[] {
    return this.#kept.slice(Math.max(0, Number(seq + 1n - this.#first)));
  }

  #shift(): InputAppend[] {
    const kept = this.#kept.shift();
    this.#keptFromS += kept?.durationS ?? 0;
    return kept?.event?.$case === "append" ? [kept.event.value] : [];
  }
}
