import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { Metadata, status } from "@grpc/grpc-js";
import type { Identity } from "./credentials.js";
import { describe, Endpoints, unary } from "./endpoints.js";
import { errorFromStatus, failure, isServiceError, StagemeshError } from "./errors.js";
import {
  type DeepPartial,
  type DescribePipelineResponse,
  GenerateRequest,
  type GenerateResponse,
} from "./gen/stagemesh/v1/orchestrator.js";
import { Parameters } from "./gen/stagemesh/v1/request.js";
import { type GenerateEvent, knownEvent, Received } from "./received.js";
import { mayCallAgain, Pauses } from "./retries.js";
import { Session, type SessionInput } from "./session/session.js";

/** The fields of a GenerateRequest that a caller sets. The client itself sets those for attaching again. */
export type GenerateInput = DeepPartial<GenerateRequest>;

export interface GenerateOptions {
  /** Stops the request when it is aborted. */
  readonly signal?: AbortSignal;
  /** The time at which the request ends with DEADLINE_EXCEEDED. Without it, the client calls again without end. */
  readonly deadline?: Date;
  /** For how many seconds the request continues while the client is disconnected, at most 60. Default 30. */
  readonly lingerS?: number;
}

const CANCEL_TIMEOUT_MS = 2000;

/**
 * A client of one pipeline, which one or several orchestrators serve. It uses one of them until that one fails.
 *
 *     const client = new StagemeshClient(["127.0.0.1:7780"]);
 *     for await (const event of client.generate("Hello")) {
 *       if (event.$case === "output") console.log(event.value.name, event.value.content);
 *     }
 */
export class StagemeshClient {
  readonly #endpoints: Endpoints;

  /** `endpoints` are the addresses of orchestrators, as "host:port". Throws an error if a file of `identity` is missing. */
  constructor(endpoints: readonly string[], identity: Identity = {}) {
    this.#endpoints = new Endpoints(endpoints, identity);
  }

  /**
   * Runs a request, or a text as its prompt, and yields its events. Nothing is lost or repeated if the connection breaks
   * or if the orchestrator is replaced: the comment of `Generate` in orchestrator.proto has the rules. Leaving the loop
   * early cancels the request. Throws StagemeshError.
   */
  async *generate(
    input: GenerateInput | string,
    options: GenerateOptions = {},
  ): AsyncGenerator<GenerateEvent, void, void> {
    const content: GenerateInput =
      typeof input === "string" ? { input: { prompt: { $case: "text", value: input } } } : input;
    const request = GenerateRequest.create(content);
    request.requestId ||= randomUUID();
    request.lingerS = options.lingerS ?? 30;
    const received = new Received();
    const pauses = new Pauses();
    let isOver = false;
    try {
      for (;;) {
        let hasBegun = false;
        try {
          for await (const event of this.#call(request, options)) {
            hasBegun ||= event.$case !== "queued";
            pauses.reset();
            const choices = event.$case === "admitted" ? event.value.choices : [];
            if (choices.length === 1 && choices[0]) {
              // The next call continues with the steps that run on these replicas.
              request.admittedCall = request.earlierCalls;
              request.preferredReplicas = choices[0].replicas;
            }
            if (received.add(event)) yield event;
          }
          isOver = true;
          return;
        } catch (thrown) {
          if (!(thrown instanceof StagemeshError)) throw thrown;
          isOver = !mayCallAgain(thrown, hasBegun);
          if (isOver) throw thrown;
          await pause(pauses.after(thrown), options);
          this.#endpoints.leave(thrown);
        }
        request.earlierCalls += 1;
        request.nextPositions = received.positions;
        // Outputs of two generations do not fit together.
        request.generation = received.generation || request.generation;
        if (received.seed !== undefined) {
          request.parameters = Parameters.create({ ...request.parameters, seed: received.seed });
        }
      }
    } finally {
      // The consumer left the loop, or the signal was aborted. Without this call, the request would run for lingerS more.
      if (!isOver) await this.#leave(request.requestId);
    }
  }

  /** Opens a session: a conversation of numbered turns. Throws StagemeshError if it cannot be opened. */
  converse(input: SessionInput = {}): Promise<Session> {
    return Session.open(this.#endpoints, input);
  }

  /** Stops a request on every stage. Throws StagemeshError: NOT_FOUND (UNKNOWN_REQUEST) if no orchestrator runs it. */
  async cancel(requestId: string): Promise<void> {
    const errors: StagemeshError[] = [];
    for (const stub of this.#endpoints.stubs) {
      try {
        await unary((done) => stub.cancelRequest({ requestId, whenLeft: false }, done));
        return;
      } catch (thrown) {
        if (!(thrown instanceof StagemeshError)) throw thrown;
        errors.push(thrown);
      }
    }
    throw errors.find(({ code }) => code === status.NOT_FOUND) ?? errors[0];
  }

  /** Returns the current state of the pipeline. Throws StagemeshError. */
  describe(): Promise<DescribePipelineResponse> {
    return describe(this.#endpoints.current);
  }

  /** Closes the connections. Requests and sessions that still run fail. */
  close(): void {
    this.#endpoints.close();
  }

  /** Makes one call of `Generate` and yields its events. Throws StagemeshError. */
  async *#call(request: GenerateRequest, { signal, deadline }: GenerateOptions): AsyncGenerator<GenerateEvent> {
    const stub = await this.#endpoints.checked();
    const call = stub.generate(request, deadline ? { deadline } : {});
    call.on("error", () => undefined); // the loop below receives it, too, unless it has ended
    const cancel = () => call.cancel();
    signal?.addEventListener("abort", cancel);
    try {
      for await (const response of call as AsyncIterable<GenerateResponse>) {
        const event = knownEvent(response);
        if (event !== undefined) yield event;
      }
    } catch (thrown) {
      throw isServiceError(thrown) ? errorFromStatus(thrown) : thrown;
    } finally {
      signal?.removeEventListener("abort", cancel);
      call.cancel();
    }
  }

  /** Tells the orchestrator that no caller will return. A failure is harmless: the request then ends after lingerS. */
  async #leave(requestId: string): Promise<void> {
    const deadline = Date.now() + CANCEL_TIMEOUT_MS;
    const request = { requestId, whenLeft: true };
    await new Promise<void>((resolve) => {
      this.#endpoints.current.cancelRequest(request, new Metadata(), { deadline }, () => resolve());
    });
  }
}

async function pause(seconds: number, { signal, deadline }: GenerateOptions): Promise<void> {
  signal?.throwIfAborted();
  if (deadline !== undefined && deadline.getTime() <= Date.now() + seconds * 1000) {
    throw failure(status.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "no orchestrator answered before the deadline");
  }
  await sleep(seconds * 1000, undefined, signal ? { signal } : {});
}
