import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { credentials, type sendUnaryData, Server, ServerCredentials, status } from "@grpc/grpc-js";
import { HealthImplementation } from "grpc-health-check";
import { errorFromStatus, errorToStatus, isServiceError, toStagemeshError } from "stagemesh/errors";
import { Connector } from "stagemesh/v1/chunk";
import { MembershipServiceClient, RegisterRequest, type RegisterResponse } from "stagemesh/v1/membership";
import {
  DescribeResponse,
  ReplicaState,
  type StageServiceServer,
  StageServiceService,
} from "stagemesh/v1/stage";
import { CHANNEL_OPTIONS, checkProtocol, PROTOCOL } from "stagemesh/protocol";
import { Consumer } from "./consumer.js";
import type { StageFunction } from "./function.js";
import { Producer, type Timeouts } from "./producer.js";
import { Steps } from "./steps.js";

const MIB = 1024 * 1024;
const WINDOW_CHUNKS = 1024;
const TIMEOUTS: Timeouts = { welcomeMs: 5000, silenceMs: 2000 };
const ACCEPTING_MS = 2000;
const DRAIN_MS = 10_000;
const LAST_REPLIES_MS = 500;
const REGISTER_AGAIN_MS = 200;
const LONGEST_REGISTER_AGAIN_MS = 2000;
const REFUSED_MS = 10_000;

export interface StageOptions {
  readonly pipeline: string;
  /** The pipeline's generation (`DescribePipelineResponse.generation`). */
  readonly generation: string;
  readonly stage: string;
  readonly replica: string;
  /** The address at which the stage listens, "host:port". Port 0 selects a free one. */
  readonly listen: string;
  /** The orchestrators' ports for operators and stages. Empty if the orchestrators' configuration lists the replica. */
  readonly orchestrators?: readonly string[];
  /** The payload bytes that a producer may send ahead. */
  readonly windowBytes?: number;
  /** For how long a stage that stops accepts steps, by default for 2 seconds. */
  readonly acceptingMs?: number;
  /** By default 5 seconds for `Welcome`, and 2 seconds for an answer about a flow. */
  readonly timeouts?: Timeouts;
}

/** A replica of a stage that computes a function, with the minimum profile of docs/protocol.md. */
export class Stage {
  readonly #identity;
  readonly #steps: Steps;
  readonly #consumer: Consumer;
  readonly #producer: Producer;
  readonly #health = new HealthImplementation({ "": "NOT_SERVING" });
  readonly #server = new Server(CHANNEL_OPTIONS);
  readonly #stopping = new AbortController();

  constructor(
    readonly fn: StageFunction,
    readonly options: StageOptions,
  ) {
    const { pipeline, generation, stage, replica, windowBytes = 8 * MIB, timeouts = TIMEOUTS } = options;
    this.#identity = { pipeline, generation, stage, replica, incarnation: randomUUID() };
    this.#consumer = new Consumer(this.#identity, { windowBytes, windowChunks: WINDOW_CHUNKS, maxChunkBytes: 256 * MIB });
    this.#producer = new Producer(this.#identity, timeouts);
    const { consumer, producer } = { consumer: this.#consumer, producer: this.#producer };
    this.#steps = new Steps({ identity: this.#identity, fn, consumer, producer });
  }

  /** Begins to serve, and registers. Returns the port. */
  async start(): Promise<number> {
    this.#server.addService(StageServiceService, {
      cancelStep: (call, answer) => void respond(answer, () => this.#steps.cancel(call.request)),
      describe: (call, answer) =>
        void respond(answer, () => {
          if (call.request.protocol) checkProtocol("the orchestrator", call.request.protocol);
          return this.#describe();
        }),
      executeStep: (call) => this.#steps.execute(call),
      putChunk: (call) => this.#consumer.serve(call),
      rebindStep: (call, answer) =>
        void respond(answer, () => {
          this.#steps.rebind(call.request);
          return {};
        }),
      // grpc-js answers UNIMPLEMENTED for the other methods.
    } satisfies Partial<StageServiceServer>);
    this.#health.addToServer(this.#server);
    const port = await new Promise<number>((resolve, reject) => {
      this.#server.bindAsync(this.options.listen, ServerCredentials.createInsecure(), (error, bound) =>
        error ? reject(error) : resolve(bound),
      );
    });
    this.#health.setStatus("", "SERVING");
    const endpoint = this.options.listen.replace(/:\d+$/, `:${port}`);
    for (const orchestrator of this.options.orchestrators ?? []) void this.#register(orchestrator, endpoint);
    return port;
  }

  /** Accepts steps for two more seconds, lets running ones finish for up to ten seconds, and stops serving. */
  async stop(): Promise<void> {
    this.#stopping.abort();
    this.#health.setStatus("", "NOT_SERVING");
    await this.#steps.drain(this.options.acceptingMs ?? ACCEPTING_MS, DRAIN_MS);
    this.#consumer.close();
    // The ends of the steps and the last replies about their flows are still on their way.
    await Promise.race([new Promise<unknown>((resolve) => this.#server.tryShutdown(resolve)), sleep(LAST_REPLIES_MS)]);
    this.#producer.close();
    this.#server.forceShutdown();
  }

  #describe(): DescribeResponse {
    return DescribeResponse.create({
      ...this.#identity,
      engine: "typescript",
      state: this.#stopping.signal.aborted ? ReplicaState.DRAINING : ReplicaState.READY,
      signature: this.fn.signature,
      connectors: [Connector.GRPC],
      protocol: PROTOCOL,
    });
  }

  /** Keeps this replica registered with an orchestrator, until the stage stops. */
  async #register(orchestrator: string, endpoint: string): Promise<void> {
    const client = new MembershipServiceClient(orchestrator, credentials.createInsecure(), CHANNEL_OPTIONS);
    const { incarnation, pipeline, generation, stage, replica } = this.#identity;
    const identity = { protocol: PROTOCOL, pipeline, generation, stage, replica, incarnation, endpoint };
    let pauseMs = REGISTER_AGAIN_MS;
    while (!this.#stopping.signal.aborted) {
      const stream = client.register();
      const deregister = () => stream.end();
      this.#stopping.signal.addEventListener("abort", deregister);
      let renewal: NodeJS.Timeout | undefined;
      stream.on("data", ({ leaseS, protocol }: RegisterResponse) => {
        pauseMs = REGISTER_AGAIN_MS;
        try {
          checkProtocol(orchestrator, protocol);
          renewal = setTimeout(() => stream.write(RegisterRequest.create()), (leaseS / 3) * 1000);
        } catch (thrown) {
          stream.destroy(toStagemeshError(thrown));
        }
      });
      stream.write(RegisterRequest.create({ replica: identity }));
      const error = await new Promise<Error | undefined>((resolve) => {
        stream.on("error", resolve);
        stream.on("end", () => resolve(undefined));
      });
      clearTimeout(renewal);
      this.#stopping.signal.removeEventListener("abort", deregister);
      if (this.#stopping.signal.aborted) break;
      if (error !== undefined && !isTemporary(error)) {
        console.error(`${replica} cannot register with ${orchestrator}: ${error.message}`);
        pauseMs = REFUSED_MS;
      }
      await sleep(pauseMs, undefined, { signal: this.#stopping.signal }).catch(() => undefined);
      pauseMs = Math.min(2 * pauseMs, LONGEST_REGISTER_AGAIN_MS);
    }
    client.close();
  }
}

/** Returns whether a replica registers again soon after this error, because no operator has to act. */
function isTemporary(error: Error): boolean {
  const { code, reason } = isServiceError(error) ? errorFromStatus(error) : toStagemeshError(error);
  return code === status.UNAVAILABLE || code === status.DEADLINE_EXCEEDED || reason === "LEASE_ENDED";
}

async function respond<T>(answer: sendUnaryData<T>, compute: () => T | Promise<T>): Promise<void> {
  try {
    answer(null, await compute());
  } catch (thrown) {
    answer(errorToStatus(toStagemeshError(thrown)));
  }
}
