import { status } from "@grpc/grpc-js";
import { errorFromWire, errorToWire, failure, type StagemeshError } from "../errors.js";
import {
  ConverseRequest,
  type ConverseResponse,
  type EventRejected,
  type InputGrant,
  InputMode,
  SessionOpen,
  type SessionOpened,
  type SpeechDetected,
  type TurnCommitted,
  TurnEnded,
  TurnInterrupted,
  TurnTruncated,
} from "../gen/stagemesh/v1/orchestrator.js";
import { Parameters } from "../gen/stagemesh/v1/request.js";
import { unknownKind, unknownKindError } from "../protocol.js";
import type { GenerateEvent } from "../received.js";
import { EventLog, type SentEvent } from "./event_log.js";
import { Transcript } from "./transcript.js";
import { ReceivedTurn } from "./turn.js";

type ResponseEvent = NonNullable<ConverseResponse["event"]>;

/**
 * An event of a session, for example `{ turn: 1n, $case: "committed", value: {…} }`. Events of the request that answers a
 * turn are those of `generate`.
 */
export type SessionEvent = { readonly turn: bigint } & (
  | GenerateEvent
  | Exclude<ResponseEvent, { $case: "grant" | "rejected" | "generated" }>
);

/** The confirmation of an event, or the error with which it was rejected. */
export type Answer = TurnInterrupted | TurnTruncated | { readonly turn: bigint } | { readonly error: StagemeshError };

/** An event of the client that the session has neither confirmed nor rejected. */
interface Pending {
  readonly seq: bigint;
  readonly event: SentEvent;
  readonly resolve: (answer: Answer) => void;
}

/** The number of events that may wait for the program. More are received only while a call waits for a confirmation. */
const READ_AHEAD = 64;
/** The audio without speech that is kept for another orchestrator, in seconds. */
const HEARD_SILENCE_S = 5;

/**
 * The state of a session at its client: what was sent, what has arrived, and what waits for the program. It knows neither
 * gRPC nor a clock. Responses that arrive again are dropped.
 */
export class SessionState {
  opened: SessionOpened | undefined;
  /** The error that ended the session. */
  error: StagemeshError | undefined;
  /** Whether the session has ended without an error. */
  isClosed = false;
  /** Whether the program has closed the session. */
  isClosing = false;
  /** Why the orchestrator of the current call must forget the session. The next call waits because of `error`. */
  restart: { readonly error?: StagemeshError } | undefined;
  /** The number of methods that wait for the session, apart from readers of events. */
  callers = 0;
  /** The newest turn that was committed or has ended. The next one is the open turn. */
  committed = 0n;
  /** The newest turn that has ended. */
  ended: ReceivedTurn | undefined;
  /** The events that wait for the program. */
  deliveries: SessionEvent[] = [];
  /** The error of a rejected piece, until a method throws it. */
  pieceError: StagemeshError | undefined;
  readonly log = new EventLog();
  /** The turns that have not ended and that were committed or of which something has arrived. */
  readonly turns = new Map<bigint, ReceivedTurn>();
  readonly #pending = new Map<bigint, Pending>();
  readonly #transcript: Transcript;
  /** The events to send before those of the log: the earlier turns. */
  #first: ConverseRequest[] = [];
  /** The time of the last detected begin or end of speech, and whether speech began then. */
  #speechS = -1;
  #speaks = false;

  constructor(readonly opening: SessionOpen) {
    const isStreamed = opening.inputMode === InputMode.STREAM;
    this.#transcript = new Transcript(!isStreamed && !opening.turnDetection?.detectsOnly);
  }

  get hasEnded(): boolean {
    return this.isClosed || this.error !== undefined;
  }

  /** Whether a further response may be received now. */
  get mayRead(): boolean {
    return this.callers > 0 || this.isClosing || this.deliveries.length < READ_AHEAD;
  }

  /** Whether something waits that needs a call to the orchestrator. */
  get needsCall(): boolean {
    return this.callers > 0 || this.isClosing || this.log.hasUnsent;
  }

  /** The turn that is being answered, or else the newest one that was answered. 0 if there is none. */
  get newest(): bigint {
    const running = [...this.turns.values()].filter(({ isStopped }) => !isStopped).map(({ number }) => number);
    return running.reduce((lowest, number) => (number < lowest ? number : lowest), running[0] ?? this.committed);
  }

  /** Returns a turn that has not ended, or the newest one that has ended. Undefined for any other turn. */
  known(turn: bigint): ReceivedTurn | undefined {
    return this.ended?.number === turn ? this.ended : this.turns.get(turn);
  }

  /** Adds an event to send. `resolve` is called with the answer to it. */
  send(event: SentEvent, resolve: (answer: Answer) => void): void {
    const seq = this.log.add(event);
    this.#pending.set(seq, { seq, event, resolve });
  }

  /** Returns the first event of a call. */
  beginCall(earlierCalls: number): ConverseRequest {
    this.restart = undefined;
    this.#first = [];
    const turn = this.#endedNumber + 1n;
    const received = this.turns.get(turn);
    const value = SessionOpen.create({
      ...this.opening,
      earlierCalls,
      turn,
      nextPositions: received?.positions ?? [],
      generation: received?.generation ?? "",
    });
    return ConverseRequest.create({ event: { $case: "open", value } });
  }

  /** Records that a call has ended. The orchestrator may continue without it. */
  endCall(): void {
    this.log.isAttached = false;
  }

  /** Returns the next event to send in the current call, or undefined if there is none now. */
  nextEvent(): ConverseRequest | undefined {
    const first = this.#first.shift();
    if (first !== undefined) return first;
    if (this.isClosing && this.log.isAttached) {
      this.log.isAttached = false; // events that were not sent are dropped
      return closeEvent(this.log.sent + 1n);
    }
    return this.log.next();
  }

  /** Records a response. Throws UNKNOWN_KIND if this client does not know its kind and must not ignore it. */
  take(response: ConverseResponse): void {
    const { turn, event } = response;
    switch (event?.$case) {
      case undefined: {
        const kind = unknownKind(response);
        if (kind === undefined || response.ignorable) return;
        throw unknownKindError("the orchestrator", "ConverseResponse", kind);
      }
      case "opened":
        return this.#takeOpened(event.value);
      case "grant":
        return this.#takeGrant(event.value);
      case "rejected":
        return this.#takeRejected(event.value);
      case "speech":
        return this.#takeSpeech(turn, event.value);
      case "committed":
        return this.#takeCommitted(turn, event.value);
      case "generated":
        return this.#takeGenerated(turn, event.value);
      case "interrupted":
        if (turn > this.#endedNumber) this.#stop(this.#turn(turn), event.value);
        return;
      case "ended":
        return this.#takeEnded(turn, event.value);
      case "truncated":
        return this.#takeTruncated(turn, event.value);
    }
  }

  /**
   * Drops old audio in which no speech was detected, as the orchestrator does. A client may append silence for hours.
   * Nothing is dropped without the detection of turns.
   */
  forgetSilence(): void {
    const isSilent = this.opening.turnDetection !== undefined && !this.#speaks && this.turns.size === 0;
    if (isSilent && this.log.keptS > 2 * HEARD_SILENCE_S) this.log.forgetAudio(this.log.audioS - HEARD_SILENCE_S);
  }

  /** Drops the events of the answer to a turn that the program has not read. */
  dropAnswer(turn: bigint): void {
    this.deliveries = this.deliveries.filter((event) => event.turn !== turn || !isGenerated(event));
  }

  #takeOpened(message: SessionOpened): void {
    const { isKnown, acceptedSeq, inputLimitBytes } = message;
    if (this.opened === undefined) {
      if (acceptedSeq > 0n) {
        const text = `session '${message.sessionId}' has events of another client; use another sessionId`;
        throw failure(status.ALREADY_EXISTS, "SESSION_EXISTS", text);
      }
      this.opening.sessionId = message.sessionId;
      this.opening.parameters = Parameters.create({ ...this.opening.parameters, seed: message.seed });
      this.opened = message;
      this.deliveries.push({ turn: 0n, $case: "opened", value: message });
    }
    if (isKnown && acceptedSeq < this.log.accepted) {
      this.#restart({}, acceptedSeq); // another orchestrator has handled later events
    } else if (isKnown) {
      this.log.attach(inputLimitBytes, acceptedSeq);
      this.#endClears();
    } else {
      this.#confirmHere();
      if (!this.isClosing) this.#first.push(...this.#transcript.events());
      this.log.restart(inputLimitBytes);
    }
  }

  /** Confirms interruptions and truncations for an orchestrator that has not produced the answer. */
  #confirmHere(): void {
    const output = this.opened?.transcriptOutput ?? "";
    const interrupted = this.#pendingOf("interrupt").map(({ event }) => event.value.turn);
    const turns = [...this.turns.values()].sort((a, b) => Number(a.number - b.number));
    for (const turn of turns.filter(({ isStopped, number }) => isStopped || interrupted.includes(number))) {
      this.#stop(turn, TurnInterrupted.create());
      this.#takeEnded(turn.number, TurnEnded.create({ answer: turn.text(output) }));
    }
    for (const { event } of this.#pendingOf("truncate")) {
      const { turn, positions } = event.value;
      const answer = this.#transcript.shortened(positions, output, this.ended?.positions ?? []);
      this.#takeTruncated(turn, TurnTruncated.create({ answer }));
    }
  }

  #takeGrant({ inputLimitBytes, acceptedSeq }: InputGrant): void {
    this.log.grant(inputLimitBytes, acceptedSeq);
    this.#endClears();
  }

  /** Confirms the clears that the session has handled. */
  #endClears(): void {
    for (const { seq } of this.#pendingOf("clear")) {
      if (seq > this.log.accepted) continue;
      this.log.clear(this.#lastCommit, seq);
      this.log.withdraw(seq);
      this.#resolve(seq, { turn: this.committed + 1n });
    }
  }

  #takeRejected({ seq, error: wireError }: EventRejected): void {
    const error = errorFromWire(wireError);
    if (seq <= this.#lastCommit && this.log.hasContent(seq)) return this.#takeRejectedRestore(error);
    this.log.grant(0n, seq - 1n);
    this.#endClears();
    if (this.log.reject(seq)) this.pieceError = error;
    this.#resolve(seq, { error });
    this.log.grant(0n, seq);
  }

  /** Records that an orchestrator does not continue a turn which another one has committed. */
  #takeRejectedRestore(error: StagemeshError): void {
    const [turn] = [...this.turns.values()].sort((a, b) => Number(a.number - b.number));
    if (error.retryAfterS !== undefined) return this.#restart({ error }, this.log.sent);
    const answer = turn?.text(this.opened?.transcriptOutput ?? "") ?? "";
    if (turn) this.#takeEnded(turn.number, TurnEnded.create({ answer, error: errorToWire(error) }));
    this.#restart({}, this.log.sent);
  }

  /** Asks the orchestrator to forget the session. `handled` is the last event that it has received. */
  #restart(restart: { error?: StagemeshError }, handled: bigint): void {
    if (this.restart !== undefined) return;
    this.restart = restart;
    this.log.isAttached = false;
    this.#first = [closeEvent(handled + 1n)];
  }

  #takeSpeech(turn: bigint, value: SpeechDetected): void {
    const atS = value.atS + this.log.restoredAtS;
    if (atS <= this.#speechS) return;
    [this.#speechS, this.#speaks] = [atS, value.begins];
    if (this.#speaks && this.turns.size === 0) this.log.forgetAudio(atS - HEARD_SILENCE_S);
    this.deliveries.push({ turn, $case: "speech", value: { ...value, atS } });
  }

  #takeCommitted(number: bigint, value: TurnCommitted): void {
    if (number <= this.committed) return;
    this.committed = number;
    const turn = this.#turn(number);
    const audioEndS = value.detected ? value.audioEndS + this.log.restoredAtS : 0;
    this.deliveries.push({ turn: number, $case: "committed", value: { ...value, audioEndS } });
    const [commit] = this.#pendingOf("commit");
    if (value.detected) {
      turn.audioEndS = audioEndS;
    } else if (commit !== undefined) {
      turn.lastEvent = commit.seq;
      this.#resolve(commit.seq, { turn: number });
    }
  }

  #takeGenerated(number: bigint, response: Extract<ResponseEvent, { $case: "generated" }>["value"]): void {
    const isCleared = number > this.committed && this.#pendingOf("clear").length > 0;
    if (number <= this.#endedNumber || isCleared) return;
    const turn = this.#turn(number);
    if (turn.isStopped) return;
    const event = turn.take(response);
    if (event !== undefined) this.deliveries.push({ turn: number, ...event });
  }

  #stop(turn: ReceivedTurn, value: TurnInterrupted): void {
    if (turn.isStopped) return;
    turn.isStopped = true;
    this.dropAnswer(turn.number);
    const positions = value.positions.length > 0 ? value.positions : turn.positions;
    const interrupted = { ...value, positions };
    this.deliveries.push({ turn: turn.number, $case: "interrupted", value: interrupted });
    for (const { seq, event } of this.#pendingOf("interrupt")) {
      if (event.value.turn !== 0n && event.value.turn !== turn.number) continue;
      // Streamed input that was not committed ends with the interruption.
      turn.lastEvent ||= seq;
      this.log.withdraw(seq);
      this.#resolve(seq, interrupted);
    }
  }

  #takeEnded(number: bigint, value: TurnEnded): void {
    if (number <= this.#endedNumber) return;
    const turn = this.#turn(number);
    this.ended = turn;
    this.turns.delete(number);
    if (number > this.committed) this.committed = number;
    const isDetected = turn.audioEndS !== undefined;
    const pieces = isDetected ? this.log.endDetectedTurn(turn.audioEndS!) : this.log.endTurn(turn.lastEvent);
    this.#transcript.add(number, pieces, value.answer);
    this.deliveries.push({ turn: number, $case: "ended", value });
  }

  #takeTruncated(number: bigint, value: TurnTruncated): void {
    if (number !== this.#endedNumber) return;
    this.#transcript.answer = value.answer;
    const [truncate] = this.#pendingOf("truncate");
    if (truncate === undefined) return;
    this.deliveries.push({ turn: number, $case: "truncated", value });
    this.log.withdraw(truncate.seq);
    this.#resolve(truncate.seq, value);
  }

  get #endedNumber(): bigint {
    return this.ended?.number ?? 0n;
  }

  /** The number of the last event that has committed a turn which has not ended. */
  get #lastCommit(): bigint {
    return [...this.turns.values()].reduce((last, { lastEvent }) => (lastEvent > last ? lastEvent : last), 0n);
  }

  #turn(number: bigint): ReceivedTurn {
    const turn = this.turns.get(number) ?? new ReceivedTurn(number);
    this.turns.set(number, turn);
    return turn;
  }

  /** Returns the unanswered events of a kind, oldest first. */
  #pendingOf<K extends SentEvent["$case"]>(kind: K): (Pending & { event: Extract<SentEvent, { $case: K }> })[] {
    return [...this.#pending.values()].filter(
      (pending): pending is Pending & { event: Extract<SentEvent, { $case: K }> } => pending.event.$case === kind,
    );
  }

  /** Answers an event. Does nothing if it is answered already. */
  #resolve(seq: bigint, answer: Answer): void {
    this.#pending.get(seq)?.resolve(answer);
    this.#pending.delete(seq);
  }
}

function isGenerated({ $case }: SessionEvent): boolean {
  return ["queued", "admitted", "progress", "output", "finished"].includes($case);
}

function closeEvent(seq: bigint): ConverseRequest {
  return ConverseRequest.create({ seq, event: { $case: "close", value: {} } });
}
