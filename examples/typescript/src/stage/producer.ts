import { setTimeout as sleep } from "node:timers/promises";
import { type ClientDuplexStream, credentials, status } from "@grpc/grpc-js";
import { errorFromStatus, failure, isServiceError, type StagemeshError, toStagemeshError } from "stagemesh/errors";
import type { EdgeKey } from "stagemesh/v1/chunk";
import {
  type Hello,
  PutChunkRequest,
  type PutChunkResponse,
  type PutItem,
  type PutReply,
  StageServiceClient,
  type Welcome,
} from "stagemesh/v1/stage";
import { CHANNEL_OPTIONS, checkProtocol, PROTOCOL, unknownKind, unknownKindError } from "stagemesh/protocol";
import type { Identity } from "./consumer.js";
import { idOf, LOST_PEER_MS } from "./flows.js";
import { type Link, type OutgoingEdge, OutgoingFlow } from "./outgoing.js";

const RECONNECT_MS = 100;
const INLINE_LIMIT_BYTES = 4096;

/** How long this stage waits for a consumer, in milliseconds. */
export interface Timeouts {
  /** For `Welcome`. After that, the connection is made again. */
  readonly welcomeMs: number;
  /** For an answer about a flow. After that, the flow is opened again. */
  readonly silenceMs: number;
}

/** Sends the flows of the edges that leave this stage. Keeps a connection to each consumer that has flows. */
export class Producer {
  readonly #links = new Map<string, ConsumerLink>();

  constructor(
    readonly identity: Identity,
    readonly timeouts: Timeouts,
  ) {}

  /** Opens a flow of an edge to a consumer, in place of the edge's present one. */
  bind(edge: OutgoingEdge, key: EdgeKey, consumer: string, endpoint: string): void {
    const message = `attempt ${edge.flow?.key.attempt} of edge ${edge.name} was replaced`;
    edge.flow?.fail(failure(status.CANCELLED, "STALE_ATTEMPT", message));
    let link = this.#links.get(endpoint);
    if (link === undefined) {
      const { pipeline, generation, replica, incarnation } = this.identity;
      // All its streams are authenticated calls, which need no secret.
      const localSecret = new Uint8Array();
      const hello = { replica, incarnation, pipeline, generation, protocol: PROTOCOL, localSecret };
      link = new ConsumerLink(endpoint, consumer, hello, this.timeouts, () => this.#links.delete(endpoint));
      this.#links.set(endpoint, link);
    }
    edge.flow = new OutgoingFlow(key, edge, link);
    link.add(edge.flow);
    edge.changed.fire();
  }

  close(): void {
    for (const link of this.#links.values()) link.close();
  }
}

/** A connection to a consumer, which is made again while there are flows. */
class ConsumerLink implements Link {
  inlineLimitBytes = 0;
  isReady = false;
  readonly #client: StageServiceClient;
  readonly #flows = new Map<string, OutgoingFlow>();
  #stream: ClientDuplexStream<PutChunkRequest, PutChunkResponse> | undefined;
  #incarnation = "";
  #seenAt = Date.now();
  #isClosed = false;

  constructor(
    endpoint: string,
    readonly consumer: string,
    readonly hello: Hello,
    readonly timeouts: Timeouts,
    readonly onOver: () => void,
  ) {
    this.#client = new StageServiceClient(endpoint, credentials.createInsecure(), CHANNEL_OPTIONS);
    void this.#run();
  }

  get silenceMs(): number {
    return this.timeouts.silenceMs;
  }

  add(flow: OutgoingFlow): void {
    if (this.#flows.size === 0) this.#seenAt = Date.now();
    this.#flows.set(idOf(flow.key), flow);
    if (this.isReady) flow.open();
  }

  remove(flow: OutgoingFlow): void {
    if (this.#flows.get(idOf(flow.key)) === flow) this.#flows.delete(idOf(flow.key));
  }

  put(item: NonNullable<PutItem["item"]>): void {
    if (this.isReady) this.#stream?.write(PutChunkRequest.create({ items: [{ item }] }));
  }

  close(): void {
    this.#isClosed = true;
    this.#stream?.cancel();
  }

  async #run(): Promise<void> {
    const timer = setInterval(() => this.#checkSilence(), this.silenceMs / 4);
    do {
      try {
        await this.#serveStream();
      } catch (thrown) {
        const error = toStagemeshError(thrown);
        // Without a reason, the connection broke. gRPC itself answers UNIMPLEMENTED for a peer without the method.
        const isRefusal = error.reason !== "" && error.code !== status.UNAVAILABLE;
        if (error.code === status.UNIMPLEMENTED && !isRefusal) this.#failFlows(this.#withoutMethod());
        else if (isRefusal) this.#failFlows(error);
      }
      this.isReady = false;
      for (const flow of this.#flows.values()) flow.disconnect();
      if (Date.now() - this.#seenAt > LOST_PEER_MS) {
        this.#failFlows(this.#lost(`${this.consumer} is unreachable`));
      }
      if (!this.#isClosed) await sleep(RECONNECT_MS);
    } while (this.#flows.size > 0 && !this.#isClosed);
    clearInterval(timer);
    this.#failFlows(this.#lost(`${this.hello.replica} shuts down`));
    this.onOver();
    this.#client.close();
  }

  /** Opens a stream and handles its replies until it ends. Throws StagemeshError. */
  async #serveStream(): Promise<void> {
    const stream = this.#client.putChunk();
    stream.on("error", () => undefined); // the loop below receives it, too, unless it has ended
    this.#stream = stream;
    const welcomeTimer = setTimeout(() => stream.cancel(), this.timeouts.welcomeMs);
    stream.write(PutChunkRequest.create({ hello: this.hello }));
    try {
      for await (const { welcome, replies } of stream as AsyncIterable<PutChunkResponse>) {
        if (!this.isReady) {
          clearTimeout(welcomeTimer);
          this.#welcomed(welcome);
        }
        this.#seenAt = Date.now();
        for (const reply of replies) this.#take(reply);
      }
    } catch (thrown) {
      throw isServiceError(thrown) ? errorFromStatus(thrown) : thrown;
    } finally {
      clearTimeout(welcomeTimer);
      this.#seenAt = this.isReady ? Date.now() : this.#seenAt;
      stream.cancel();
    }
  }

  #welcomed(welcome: Welcome | undefined): void {
    checkProtocol(this.consumer, welcome?.protocol);
    this.#incarnation = welcome?.incarnation ?? "";
    this.inlineLimitBytes = Math.min(INLINE_LIMIT_BYTES, Number(welcome?.inlineLimitBytes ?? 0n));
    this.isReady = true;
    for (const flow of this.#flows.values()) {
      if (flow.incarnation === "" || flow.incarnation === this.#incarnation) flow.open();
      else flow.fail(this.#lost(`${this.consumer} was restarted`));
    }
  }

  #take({ reply, ignorable, key: keyOfLaterKind, ...rest }: PutReply): void {
    const kind = reply === undefined ? unknownKind(rest) : undefined;
    if (kind !== undefined && !ignorable) {
      const error = unknownKindError(this.consumer, "PutReply", kind);
      if (keyOfLaterKind === undefined) throw error;
      this.#flows.get(idOf(keyOfLaterKind))?.fail(error);
    }
    if (reply === undefined) return;
    // This stage offers no connector, and sends neither leases nor tickets.
    if (reply.$case === "offerAnswer" || reply.$case === "release" || reply.$case === "accept") return;
    const { key } = reply.value;
    const flow = key && this.#flows.get(idOf(key));
    if (reply.$case === "opened" && flow) flow.incarnation = this.#incarnation;
    flow?.take(reply);
  }

  #checkSilence(): void {
    if (this.isReady) for (const flow of this.#flows.values()) flow.checkSilence();
  }

  #failFlows(error: StagemeshError): void {
    for (const flow of this.#flows.values()) flow.fail(error);
  }

  #withoutMethod(): StagemeshError {
    const message = `${this.consumer} does not serve PutChunk`;
    return failure(status.UNIMPLEMENTED, "UNSUPPORTED", message, { replica: this.consumer });
  }

  #lost(message: string): StagemeshError {
    return failure(status.UNAVAILABLE, "PEER_LOST", message, { replica: this.consumer });
  }
}
