import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { Metadata, status } from "@grpc/grpc-js";
import { channelCredentials, type Identity } from "./credentials.js";
import { errorFromStatus, failure, isServiceError, StagemeshError } from "./errors.js";
import {
  type DeepPartial,
  type DescribePipelineResponse,
  GenerateRequest,
  type GenerateResponse,
  OrchestratorServiceClient,
  OutputPosition,
} from "./gen/stagemesh/v1/orchestrator.js";
import { FinishReason, type Output, Parameters } from "./gen/stagemesh/v1/request.js";
import { CHANNEL_OPTIONS, checkProtocol, PROTOCOL, unknownKind, unknownKindError } from "./protocol.js";

/** An event of a request, for example `{ $case: "output", value: {…} }`. */
export type GenerateEvent = NonNullable<GenerateResponse["event"]>;

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

const FIRST_PAUSE_S = 0.05;
const LONGEST_PAUSE_S = 2;
const DESCRIBE_TIMEOUT_MS = 5000;
const CANCEL_TIMEOUT_MS = 2000;

/**
 * A client of one pipeline, which one or several orchestrators serve. It uses one of them until that one fails.
 *
 *     const client = new StagemeshClient(["127.0.0.1:7780"]);
 *     for await (const event of client.generate({ input: { prompt: { $case: "text", value: "Hello" } } })) {
 *       if (event.$case === "output") console.log(event.value.name, event.value.content);
 *     }
 */
export class StagemeshClient {
  readonly #stubs: readonly OrchestratorServiceClient[];
  readonly #checked = new Set<OrchestratorServiceClient>();
  #current = 0;

  constructor(endpoints: readonly string[], identity: Identity = {}) {
    if (endpoints.length === 0) throw new RangeError("a client needs the address of an orchestrator");
    const credentials = channelCredentials(identity);
    this.#stubs = endpoints.map((endpoint) => new OrchestratorServiceClient(endpoint, credentials, CHANNEL_OPTIONS));
  }

  /**
   * Runs a request and yields its events. Nothing is lost or repeated if the connection breaks or if the orchestrator is
   * replaced: the comment of `Generate` in orchestrator.proto has the rules. Leaving the loop early cancels the request.
   * Throws StagemeshError.
   */
  async *generate(input: GenerateInput, options: GenerateOptions = {}): AsyncGenerator<GenerateEvent, void, void> {
    const request = GenerateRequest.create(input);
    request.requestId ||= randomUUID();
    request.lingerS = options.lingerS ?? 30;
    const received = new Received();
    let pauseS = FIRST_PAUSE_S;
    let isOver = false;
    try {
      for (;;) {
        let hasBegun = false;
        try {
          for await (const event of this.#call(request, options)) {
            hasBegun ||= event.$case !== "queued";
            pauseS = FIRST_PAUSE_S;
            if (received.add(event)) yield event;
          }
          isOver = true;
          return;
        } catch (thrown) {
          if (!(thrown instanceof StagemeshError)) throw thrown;
          isOver = !mayCallAgain(thrown, hasBegun);
          if (isOver) throw thrown;
          await pause(thrown.retryAfterS ?? pauseS, options);
          pauseS = Math.min(2 * pauseS, LONGEST_PAUSE_S);
          if (thrown.code === status.UNAVAILABLE) this.#current = (this.#current + 1) % this.#stubs.length;
        }
        request.earlierCalls += 1;
        request.nextPositions = [...received.ends.values()];
        // Outputs of two generations do not fit together.
        if (received.ends.size > 0) request.generation = received.generation;
        if (received.seed !== undefined) {
          request.parameters = Parameters.create({ ...request.parameters, seed: received.seed });
        }
      }
    } finally {
      // The consumer left the loop, or the signal was aborted. Without this call, the request would run for lingerS more.
      if (!isOver) await this.#cancel(request.requestId);
    }
  }

  close(): void {
    for (const stub of this.#stubs) stub.close();
  }

  get #stub(): OrchestratorServiceClient {
    return this.#stubs[this.#current]!;
  }

  /** Makes one call of `Generate` and yields its events. Throws StagemeshError. */
  async *#call(request: GenerateRequest, { signal, deadline }: GenerateOptions): AsyncGenerator<GenerateEvent> {
    await this.#checkVersion(this.#stub);
    const call = this.#stub.generate(request, deadline ? { deadline } : {});
    call.on("error", () => undefined); // the loop below receives it, too, unless it has ended
    const cancel = () => call.cancel();
    signal?.addEventListener("abort", cancel);
    try {
      for await (const response of call as AsyncIterable<GenerateResponse>) {
        if (isKnown(response)) yield response.event;
      }
    } catch (thrown) {
      throw isServiceError(thrown) ? errorFromStatus(thrown) : thrown;
    } finally {
      signal?.removeEventListener("abort", cancel);
      call.cancel();
    }
  }

  /** Tells the orchestrator that no caller will return. A failure is harmless: the request then ends after lingerS. */
  async #cancel(requestId: string): Promise<void> {
    const deadline = Date.now() + CANCEL_TIMEOUT_MS;
    await new Promise<void>((resolve) => {
      this.#stub.cancelRequest({ requestId, whenLeft: true }, new Metadata(), { deadline }, () => resolve());
    });
  }

  /** Checks once that an orchestrator and this client have a version in common. */
  async #checkVersion(stub: OrchestratorServiceClient): Promise<void> {
    if (this.#checked.has(stub)) return;
    const description = await new Promise<DescribePipelineResponse>((resolve, reject) => {
      const deadline = Date.now() + DESCRIBE_TIMEOUT_MS;
      stub.describePipeline({ pipeline: "", protocol: PROTOCOL }, new Metadata(), { deadline }, (error, response) =>
        error ? reject(errorFromStatus(error)) : resolve(response),
      );
    });
    checkProtocol("the orchestrator", description.protocol);
    this.#checked.add(stub);
  }
}

/** What a client has received of a request. It says where the next call continues, and which events are repeated. */
class Received {
  seed: bigint | undefined;
  /** The generation in which the request runs. */
  generation = "";
  /** For each output of each choice, the end of its last part. */
  readonly ends = new Map<string, OutputPosition>();
  readonly #complete = new Set<string>();
  readonly #steps = new Map<string, bigint>();
  #isFinished = false;

  /** Records an event. Returns false if the caller has it already. */
  add(event: GenerateEvent): boolean {
    switch (event.$case) {
      case "queued":
        return this.seed === undefined;
      case "admitted": {
        const isFirst = this.seed === undefined;
        this.seed ??= event.value.seed;
        this.generation = event.value.generation;
        return isFirst;
      }
      case "progress": {
        const { stage, progress, index } = event.value;
        const key = `${stage} ${index}`;
        const steps = progress?.steps ?? 0n;
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
    const position = output.position + BigInt(lengthOf(output));
    this.ends.set(key, OutputPosition.create({ name, index, position }));
    const reason = output.finish?.reason;
    if (reason !== undefined && reason !== FinishReason.CANCELLED && reason !== FinishReason.FAILED) {
      this.#complete.add(key);
    }
    return true;
  }
}

/** Returns the length of a part of an output, in the unit of `Output.position`. */
function lengthOf({ content }: Output): number {
  switch (content?.$case) {
    case undefined:
      return 0;
    case "text":
      return [...content.value].length; // code points, not UTF-16 units
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
  }
}

/** Returns whether a response has an event. Throws UNKNOWN_KIND if it needs a newer client. */
function isKnown(response: GenerateResponse): response is GenerateResponse & { event: GenerateEvent } {
  const { event } = response;
  const output = event?.$case === "output" ? event.value : undefined;
  if (event !== undefined && (output === undefined || output.content !== undefined || output.finish !== undefined)) {
    return true;
  }
  const kind = unknownKind(output ?? response);
  if (kind === undefined || response.ignorable) return false;
  throw unknownKindError("the orchestrator", output === undefined ? "GenerateResponse" : "Output", kind);
}

/** Returns whether a call that ended with this error is repeated. `hasBegun`: it had an event other than queued. */
function mayCallAgain(error: StagemeshError, hasBegun: boolean): boolean {
  if (error.reason === "") {
    const isBroken = [status.UNAVAILABLE, status.CANCELLED, status.UNKNOWN, status.INTERNAL].includes(error.code);
    return isBroken || (!hasBegun && error.retryAfterS !== undefined);
  }
  if (error.code === status.UNAVAILABLE && (error.reason === "NOT_RUNNING" || !hasBegun)) return true;
  return !hasBegun && error.retryAfterS !== undefined;
}

async function pause(seconds: number, { signal, deadline }: GenerateOptions): Promise<void> {
  signal?.throwIfAborted();
  if (deadline !== undefined && deadline.getTime() <= Date.now() + seconds * 1000) {
    throw failure(status.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "no orchestrator answered before the deadline");
  }
  await sleep(seconds * 1000, undefined, signal ? { signal } : {});
}
