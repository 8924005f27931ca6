import { setTimeout as sleep } from "node:timers/promises";
import { randomUUID } from "node:crypto";
import { credentials, type sendUnaryData, Server, ServerCredentials } from "@grpc/grpc-js";
import { HealthImplementation } from "grpc-health-check";
import { errorToStatus, toStagemeshError } from "../errors.js";
import { Connector } from "../gen/stagemesh/v1/chunk.js";
import { MembershipServiceClient, RegisterRequest } from "../gen/stagemesh/v1/membership.js";
import {
  DescribeResponse,
  ReplicaState,
  type StageServiceServer,
  StageServiceService,
} from "../gen/stagemesh/v1/stage.js";
import { CHANNEL_OPTIONS, checkProtocol, PROTOCOL } from "../protocol.js";
import { Consumer } from "./consumer.js";
import type { StageFunction } from "./function.js";
import { Producer } from "./producer.js";
import { Steps } from "./steps.js";

const MIB = 1024 * 1024;
const DRAIN_MS = 10_000;
const REGISTER_AGAIN_MS = 1000;

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
  /** After this time without an answer, a flow is opened again. */
  readonly silenceMs?: number;
}

/** A replica of a stage that computes a function, with the minimum profile of docs/protocol.md. */
export class Stage {
  readonly #identity;
  readonly #steps: Steps;
  readonly #consumer: Consumer;
  readonly #producer: Producer;
  readonly #health = new HealthImplementation({ "": "NOT_SERVING" });
  readonly #server = new Server(CHANNEL_OPTIONS);
  readonly #registrations: (() => void)[] = [];
  #isStopping = false;

  constructor(
    readonly fn: StageFunction,
    readonly options: StageOptions,
  ) {
    const { pipeline, generation, stage, replica, windowBytes = 8 * MIB, silenceMs } = options;
    this.#identity = { pipeline, generation, stage, replica, incarnation: randomUUID() };
    this.#consumer = new Consumer(this.#identity, { windowBytes, maxChunkBytes: 256 * MIB });
    this.#producer = new Producer(this.#identity, silenceMs);
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

  /** Lets running steps finish, for up to ten seconds, and stops serving. */
  async stop(): Promise<void> {
    this.#isStopping = true;
    this.#health.setStatus("", "NOT_SERVING");
    for (const deregister of this.#registrations) deregister();
    await this.#steps.drain(DRAIN_MS);
    this.#producer.close();
    this.#server.forceShutdown();
  }

  #describe(): DescribeResponse {
    return DescribeResponse.create({
      ...this.#identity,
      engine: "typescript",
      state: this.#isStopping ? ReplicaState.DRAINING : ReplicaState.READY,
      signature: this.fn.signature,
      connectors: [Connector.GRPC],
      protocol: PROTOCOL,
    });
  }

  /** Keeps this replica registered with an orchestrator. */
  async #register(orchestrator: string, endpoint: string): Promise<void> {
    const client = new MembershipServiceClient(orchestrator, credentials.createInsecure(), CHANNEL_OPTIONS);
    while (!this.#isStopping) {
      const stream = client.register();
      const deregister = () => stream.end();
      this.#registrations.push(deregister);
      stream.on("error", (error) => !this.#isStopping && console.error(`${orchestrator}: ${error.message}`));
      let timer: NodeJS.Timeout | undefined;
      stream.on("data", ({ leaseS }: { leaseS: number }) => {
        timer = setTimeout(() => stream.write(RegisterRequest.create()), (leaseS / 3) * 1000);
      });
      const { incarnation, pipeline, generation, stage, replica } = this.#identity;
      const identity = { protocol: PROTOCOL, pipeline, generation, stage, replica, incarnation, endpoint };
      stream.write(RegisterRequest.create({ replica: identity }));
      await new Promise((resolve) => stream.once("status", resolve));
      clearTimeout(timer);
      this.#registrations.splice(this.#registrations.indexOf(deregister), 1);
      if (!this.#isStopping) await sleep(REGISTER_AGAIN_MS);
    }
    client.close();
  }
}

async function respond<T>(answer: sendUnaryData<T>, compute: () => T | Promise<T>): Promise<void> {
  try {
    answer(null, await compute());
  } catch (thrown) {
    answer(errorToStatus(toStagemeshError(thrown)));
  }
}
