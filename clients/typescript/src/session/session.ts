import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { type ClientDuplexStream, status } from "@grpc/grpc-js";
import type { Endpoints } from "../endpoints.js";
import { errorFromStatus, errorFromWire, failure, isServiceError, StagemeshError, toStagemeshError } from "../errors.js";
import {
  type ConverseRequest,
  type ConverseResponse,
  type DeepPartial,
  InputAppend,
  OutputPosition,
  SessionOpen,
  type SessionOpened,
  type TurnInterrupted,
  type TurnTruncated,
} from "../gen/stagemesh/v1/orchestrator.js";
import { checkSize } from "../protocol.js";
import { endOf } from "../received.js";
import { mayCallAgain, Pauses } from "../retries.js";
import type { SentEvent } from "./event_log.js";
import { type Content, piecesOf } from "./pieces.js";
import { type Answer, type SessionEvent, SessionState } from "./state.js";
import { textUntil } from "./transcript.js";

/** The fields of a SessionOpen that a caller sets. The session itself sets those for opening it again. */
export type SessionInput = DeepPartial<SessionOpen>;

/** How much of an answer the user has heard: a time of its audio in seconds, or positions by the name of the output. */
export interface Heard {
  readonly audioS?: number;
  readonly positions?: Readonly<Record<string, number | bigint>>;
}

type Call = ClientDuplexStream<ConverseRequest, ConverseResponse>;

const LINGER_S = 60;
/** For how long a session searches for an orchestrator that continues it. */
const SEARCH_MS = 30_000;
const CLOSE_TIMEOUT_MS = 1000;

/**
 * A session: a conversation of numbered turns. `StagemeshClient.converse` opens it.
 *
 * A program appends the input of a turn, commits it, and iterates over the events of the session. It may append the next
 * turn while a turn is answered. If the connection breaks, or if the orchestrator stops, the session continues at the same
 * or another orchestrator, and the program receives every event once: the comment of `Converse` in orchestrator.proto has
 * the rules.
 *
 * Methods throw the StagemeshError of their event if the session rejects it. The session remains usable. `append` does not
 * wait for an answer, so that the next method throws the error of a rejected piece.
 */
export class Session implements AsyncIterable<SessionEvent> {
  readonly #endpoints: Endpoints;
  readonly #state: SessionState;
  readonly #pauses = new Pauses();
  readonly #stopping = new AbortController();
  #wake: (() => void)[] = [];
  #task: Promise<void> | undefined;
  #earlierCalls = 0;
  /** Whether the last call ended because the session was idle, so that the next one waits for an event. */
  #isParked = false;
  /** The time at which the search for an orchestrator ends, in milliseconds since 1970. */
  #searchEndsMs = Date.now() + SEARCH_MS;
  /** The newest turn whose end the program has read. */
  #readEnd = 0n;

  private constructor(endpoints: Endpoints, input: SessionInput) {
    this.#endpoints = endpoints;
    const opening = SessionOpen.create(input);
    opening.sessionId ||= randomUUID();
    opening.lingerS = input.lingerS ?? LINGER_S;
    this.#state = new SessionState(opening);
  }

  /** Opens a session. Throws StagemeshError if it cannot be opened. */
  static async open(endpoints: Endpoints, input: SessionInput): Promise<Session> {
    const session = new Session(endpoints, input);
    session.#task = session.#connect();
    try {
      await session.#until(() => session.#state.opened !== undefined);
    } catch (thrown) {
      await session.close();
      throw thrown;
    }
    return session;
  }

  /** The first event of the session, with its id, its seed and its outputs. */
  get opened(): SessionOpened {
    return this.#state.opened!;
  }

  /** The number of the open turn, to which input is appended. Turns are numbered from 1. */
  get turn(): bigint {
    return this.#state.committed + 1n;
  }

  /**
   * Appends texts, parts and messages to the input of the open turn. Consecutive texts are joined, and so are consecutive
   * audio samples. Waits until the session accepts more input. Throws StagemeshError (MESSAGE_TOO_LARGE).
   */
  async append(...content: Content[]): Promise<void> {
    const { log } = this.#state;
    for (const piece of content.flatMap((each) => [...piecesOf(each)])) {
      checkSize(InputAppend.encode(piece).finish().length, "piece");
      this.#check();
      while (!log.hasCredit(piece)) await this.#until(() => log.hasCredit(piece));
      log.add({ $case: "append", value: piece });
      this.#state.forgetSilence();
      this.#fire();
    }
  }

  /** Drops the input of the open turn. */
  async clear(): Promise<void> {
    this.#state.dropAnswer(this.turn);
    await this.#send({ $case: "clear", value: {} });
  }

  /**
   * Ends the input of the open turn, so that the pipeline answers it. Returns the number of the turn. Throws
   * StagemeshError if the turn has no input (EMPTY_TURN), or while the former turn is answered (TURN_RUNNING).
   */
  async commit(): Promise<bigint> {
    const { turn } = await this.#send<{ turn: bigint }>({ $case: "commit", value: {} });
    return turn;
  }

  /**
   * Stops the answer to a turn, by default the one that is being answered. No event of the answer follows. Throws
   * StagemeshError (TURN_ENDED or TURN_NOT_STARTED) if the turn is not being answered.
   */
  interrupt(turn = this.#state.newest): Promise<TurnInterrupted> {
    return this.#send({ $case: "interrupt", value: { turn } });
  }

  /**
   * Shortens the answer to a turn in the transcript, by default the newest one, to what the user has heard. By default,
   * that is what the program has read. Later turns contain only that. Throws StagemeshError for an older turn, and
   * for more than was sent (BEYOND_OUTPUT), and for a position within a character of a text (INVALID_POSITION).
   */
  async truncate(heard: Heard = {}, turn = this.#state.newest): Promise<TurnTruncated> {
    if (this.#state.known(turn)?.isStopped) await this.#until(() => !this.#state.turns.has(turn));
    return this.#send({ $case: "truncate", value: { turn, positions: this.#positionsOf(heard, turn) } });
  }

  /** Yields the events up to the end of the turn that was committed last. Throws the error of the turn after them. */
  async *answer(): AsyncGenerator<SessionEvent, void, void> {
    const turn = this.#state.committed;
    while (this.#readEnd < turn) {
      const event = await this.#next();
      if (event === undefined) return;
      yield event;
      if (event.$case === "ended" && event.turn === turn && event.value.error) throw errorFromWire(event.value.error);
    }
  }

  /** Yields the events until the session is closed. Throws the error of the session. */
  async *[Symbol.asyncIterator](): AsyncGenerator<SessionEvent, void, void> {
    for (let event = await this.#next(); event !== undefined; event = await this.#next()) yield event;
  }

  /** Ends the session. A turn that is being answered is stopped. May be called again. */
  async close(): Promise<void> {
    this.#state.isClosing = true;
    this.#fire();
    const timer = setTimeout(() => this.#stopping.abort(), CLOSE_TIMEOUT_MS);
    await this.#task;
    clearTimeout(timer);
  }

  /** Calls the orchestrators until the session ends. Methods throw the error with which it ends. */
  async #connect(): Promise<void> {
    const { signal } = this.#stopping;
    try {
      while (!this.#state.hasEnded) {
        const pauseS = await this.#callOnce();
        this.#fire();
        while (this.#isParked && !this.#state.needsCall) await this.#changed();
        await sleep(pauseS * 1000, undefined, { signal });
      }
    } catch (thrown) {
      if (signal.aborted) this.#state.isClosed = true;
      else this.#state.error ??= toStagemeshError(thrown);
    } finally {
      this.#fire();
    }
  }

  /** Makes a call until it ends. Returns the number of seconds to wait before the next one. */
  async #callOnce(): Promise<number> {
    if (this.#isParked) this.#searchEndsMs = Date.now() + SEARCH_MS;
    this.#isParked = false;
    const answered = { value: false };
    try {
      const stub = await this.#endpoints.checked();
      await this.#readCall(stub.converse(), answered);
      return this.#endWell();
    } catch (thrown) {
      const error = isServiceError(thrown) ? errorFromStatus(thrown) : thrown;
      if (this.#state.error !== undefined || !(error instanceof StagemeshError)) throw error;
      this.#isParked = answered.value && error.reason === "SESSION_PARKED";
      if (this.#isParked) return 0;
      if (!mayCallAgain(error, answered.value)) throw error;
      return this.#pauseAfter(error);
    } finally {
      this.#earlierCalls += 1;
    }
  }

  /** Sends and receives the events of a call until it ends. Throws its status. Sets `answered` at the first response. */
  async #readCall(call: Call, answered: { value: boolean }): Promise<void> {
    const cancel = () => call.cancel();
    this.#stopping.signal.addEventListener("abort", cancel);
    call.on("error", () => undefined); // the loop below receives it, too
    let isOver = false;
    const writing = this.#writeCall(call, () => isOver);
    try {
      for await (const response of call as AsyncIterable<ConverseResponse>) {
        if (this.#state.error !== undefined) continue;
        answered.value = true;
        this.#pauses.reset();
        this.#searchEndsMs = Date.now() + SEARCH_MS;
        try {
          this.#state.take(response);
        } catch (thrown) {
          // The orchestrator is asked to close a session whose responses this client does not understand.
          this.#state.error = toStagemeshError(thrown);
          this.#state.isClosing = true;
          setTimeout(cancel, this.#state.log.isAttached ? CLOSE_TIMEOUT_MS : 0).unref();
        }
        this.#fire();
        while (!this.#state.mayRead) await this.#changed();
      }
    } finally {
      isOver = true;
      this.#state.endCall();
      this.#stopping.signal.removeEventListener("abort", cancel);
      call.cancel();
      this.#fire();
      await writing;
    }
  }

  async #writeCall(call: Call, isOver: () => boolean): Promise<void> {
    let mayWrite = call.write(this.#state.beginCall(this.#earlierCalls));
    call.on("drain", () => {
      mayWrite = true;
      this.#fire();
    });
    while (!isOver()) {
      const event = mayWrite ? this.#state.nextEvent() : undefined;
      if (event === undefined) {
        await this.#changed();
      } else {
        mayWrite = call.write(event);
        this.#fire();
      }
    }
  }

  /** Records that a call has succeeded. Returns the number of seconds to wait before the next one. */
  #endWell(): number {
    const { error, restart, isClosing } = this.#state;
    if (error !== undefined) return 0;
    if (restart?.error) {
      this.#endpoints.next();
      return this.#pauseAfter(restart.error);
    }
    if (restart === undefined && !isClosing) {
      throw failure(status.INTERNAL, "INTERNAL", "the orchestrator ended a session that was not closed");
    }
    this.#state.isClosed = restart === undefined;
    return 0;
  }

  /** Returns the number of seconds to wait after a failed call. Throws its error if that is too long. */
  #pauseAfter(error: StagemeshError): number {
    const pauseS = this.#pauses.after(error);
    if (Date.now() + pauseS * 1000 > this.#searchEndsMs) throw error;
    this.#endpoints.leave(error);
    return pauseS;
  }

  /** Sends an event, and returns its confirmation. Throws its error if the session rejects it. */
  async #send<T extends Answer>(event: SentEvent): Promise<T> {
    this.#check();
    let answer: Answer | undefined;
    this.#state.send(event, (resolved) => (answer = resolved));
    await this.#until(() => answer !== undefined);
    const resolved = answer as unknown as Answer;
    if ("error" in resolved) throw resolved.error;
    this.#checkPieces();
    return resolved as T;
  }

  async #next(): Promise<SessionEvent | undefined> {
    const state = this.#state;
    while (!state.hasEnded && state.deliveries.length === 0) await this.#changed();
    const event = state.deliveries.shift();
    this.#fire();
    if (event === undefined) {
      if (state.error !== undefined) throw state.error;
      return undefined;
    }
    if (event.$case === "output") state.known(event.turn)?.heard.set(event.value.name, endOf(event.value));
    if (event.$case === "ended") this.#readEnd = event.turn;
    return event;
  }

  #positionsOf({ audioS, positions }: Heard, turn: bigint): OutputPosition[] {
    const answer = this.#state.known(turn);
    if (positions !== undefined) {
      return Object.entries(positions).map(([name, end]) => {
        textUntil(answer?.text(name) ?? "", BigInt(end));
        return OutputPosition.create({ name, position: BigInt(end) });
      });
    }
    if (audioS !== undefined) {
      if (answer?.audio === undefined) {
        throw failure(status.NOT_FOUND, "NO_AUDIO", "the turn produced no audio; set positions instead");
      }
      const { output, sampleRateHz } = answer.audio;
      return [OutputPosition.create({ name: output, position: BigInt(Math.floor(audioS * sampleRateHz)) })];
    }
    const arrived = answer?.positions.map(({ name }) => name) ?? [];
    const names = arrived.length > 0 ? arrived : this.opened.outputs.slice(0, 1);
    return names.map((name) => OutputPosition.create({ name, position: answer?.heard.get(name) ?? 0n }));
  }

  /** Waits for a condition. Throws if the session ends before. */
  async #until(condition: () => boolean): Promise<void> {
    this.#state.callers += 1;
    this.#fire();
    try {
      while (!condition()) {
        this.#check();
        await this.#changed();
      }
    } finally {
      this.#state.callers -= 1;
    }
  }

  /** Throws the error of the session or of a rejected piece, if there is one. */
  #check(): void {
    const { error, isClosed, isClosing } = this.#state;
    if (error !== undefined) throw error;
    if (isClosed || isClosing) {
      throw failure(status.FAILED_PRECONDITION, "SESSION_CLOSED", "the session was closed; open another one");
    }
    this.#checkPieces();
  }

  #checkPieces(): void {
    const error = this.#state.pieceError;
    this.#state.pieceError = undefined;
    if (error !== undefined) throw error;
  }

  /** Resolves at the next `#fire`. */
  #changed(): Promise<void> {
    return new Promise((resolve) => this.#wake.push(resolve));
  }

  #fire(): void {
    const waiting = this.#wake;
    this.#wake = [];
    for (const wake of waiting) wake();
  }
}
