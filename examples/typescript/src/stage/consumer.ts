import { type ServerDuplexStream, status } from "@grpc/grpc-js";
import { errorToStatus, errorToWire, failure, type StagemeshError, toStagemeshError } from "stagemesh/errors";
import { Connector, EdgeKey } from "stagemesh/v1/chunk";
import {
  type Hello,
  type OpenEdge,
  type PutChunkRequest,
  PutChunkResponse,
  type PutItem,
  PutReply,
} from "stagemesh/v1/stage";
import { checkProtocol, PROTOCOL, unknownKind, unknownKindError } from "stagemesh/protocol";
import { checkKey } from "./checks.js";
import { idOf, RecentMap } from "./flows.js";
import { type CreditLimits, type IncomingEdge, IncomingFlow, type Session } from "./incoming.js";

type Stream = ServerDuplexStream<PutChunkRequest, PutChunkResponse>;

/** Who this replica is, for its peers. */
export interface Identity {
  readonly pipeline: string;
  readonly generation: string;
  readonly stage: string;
  readonly replica: string;
  /** Generated at random when the process starts. */
  readonly incarnation: string;
}

interface PastFlow {
  readonly producer: string;
  readonly outcome: StagemeshError | "committed";
}

const INLINE_LIMIT_BYTES = 4096n;
const REMEMBERED_FLOWS = 4096;
const HELLO_MS = 10_000;

/** Serves `PutChunk`: receives the flows of the edges that enter this stage. */
export class Consumer {
  readonly #flows = new Map<string, IncomingFlow>();
  /** The flows that are over, with what their producers are answered. */
  readonly #past = new RecentMap<string, PastFlow>(REMEMBERED_FLOWS);
  readonly #streams = new Set<Stream>();
  /** The latest incarnation of each producer. */
  readonly #incarnations = new Map<string, string>();

  constructor(
    readonly identity: Identity,
    readonly limits: CreditLimits,
  ) {}

  /** Registers a flow of an edge. Until then, its producer is rejected. */
  expect(key: EdgeKey, producer: string, edge: IncomingEdge): IncomingFlow {
    const flow = new IncomingFlow(key, producer, edge, this.limits, (over, outcome) => {
      this.#past.set(idOf(over.key), { producer: over.producer, outcome });
      // Another producer may have been bound in the same attempt.
      if (this.#flows.get(idOf(over.key)) === over) this.#flows.delete(idOf(over.key));
    });
    this.#flows.set(idOf(key), flow);
    return flow;
  }

  /** Serves a stream of a producer until it ends. The flows of the stream survive it. */
  serve(stream: Stream): void {
    let session: ProducerSession | undefined;
    this.#streams.add(stream);
    const helloTimer = setTimeout(() => end(noHello("a stream begins with a Hello within 10 seconds")), HELLO_MS);
    const detach = (): void => {
      clearTimeout(helloTimer);
      this.#streams.delete(stream);
      for (const flow of this.#flows.values()) if (session) flow.detach(session);
    };
    const end = (error: StagemeshError): void => {
      detach();
      stream.emit("error", errorToStatus(error));
    };
    stream.on("data", ({ hello, items }: PutChunkRequest) => {
      clearTimeout(helloTimer);
      try {
        session ??= this.#welcome(stream, hello);
        for (const item of items) this.#take(session, item);
      } catch (thrown) {
        end(toStagemeshError(thrown));
      }
    });
    stream.on("end", () => {
      detach();
      stream.end();
    });
    stream.on("cancelled", detach);
    stream.on("error", detach);
  }

  /** Ends the streams, after the replies that are due. */
  close(): void {
    setImmediate(() => this.#streams.forEach((stream) => stream.end()));
  }

  #welcome(stream: Stream, hello: Hello | undefined): ProducerSession {
    if (!hello?.replica || !hello.incarnation) {
      throw noHello("the first message needs a Hello with replica and incarnation");
    }
    const { pipeline, generation, replica, incarnation } = this.identity;
    if (hello.pipeline !== pipeline) {
      const message = `${hello.replica} serves the pipeline ${hello.pipeline}, and ${replica} serves ${pipeline}`;
      throw failure(status.FAILED_PRECONDITION, "WRONG_PIPELINE", message);
    }
    if (hello.generation !== generation) {
      const message = `${hello.replica} serves the generation ${hello.generation}, and ${replica} serves ${generation}`;
      throw failure(status.FAILED_PRECONDITION, "WRONG_GENERATION", message);
    }
    checkProtocol(hello.replica, hello.protocol);
    if (this.#incarnations.get(hello.replica) !== hello.incarnation) {
      this.#incarnations.set(hello.replica, hello.incarnation);
      for (const flow of this.#flows.values()) {
        const isOfDead = flow.producer === hello.replica && flow.incarnation && flow.incarnation !== hello.incarnation;
        if (isOfDead) flow.fail(flow.lost());
      }
    }
    const welcome = { replica, incarnation, protocol: PROTOCOL, inlineLimitBytes: INLINE_LIMIT_BYTES };
    stream.write(PutChunkResponse.create({ welcome }));
    return new ProducerSession(stream, hello.replica, hello.incarnation);
  }

  /** Handles an item. An error of one flow rejects that flow alone. */
  #take(session: ProducerSession, { item, ignorable, key: keyOfLaterKind, ...rest }: PutItem): void {
    if (item?.$case === "offer") {
      const message = `${this.identity.replica} reads by the connector grpc alone`;
      const error = errorToWire(failure(status.FAILED_PRECONDITION, "CONNECTOR_UNAVAILABLE", message));
      session.reply({ $case: "offerAnswer", value: { connector: item.value.connector, error } });
      return;
    }
    // Answers an acceptance of tickets, which this stage never sends.
    if (item?.$case === "tickets") return;
    const kind = item === undefined ? unknownKind(rest) : undefined;
    if (item === undefined && (kind === undefined || ignorable)) return;
    const key = item === undefined ? keyOfLaterKind : (item.value.key ?? EdgeKey.create());
    const unknown = kind === undefined ? undefined : unknownKindError(session.producer, "PutItem", kind);
    if (key === undefined) throw unknown;
    checkKey(key);
    const flow = this.#flowOf(session, key);
    if (flow === undefined) return;
    try {
      if (unknown !== undefined) throw unknown;
      switch (item?.$case) {
        case "open":
          this.#open(flow, session, item.value);
          break;
        case "chunk":
          flow.takeChunk(session, item.value);
          break;
        case "fragment":
          flow.takeFragment(session, item.value);
          break;
        case "demand":
          flow.demand(session, Number(item.value.sizeBytes));
          break;
      }
    } catch (thrown) {
      flow.reject(session, toStagemeshError(thrown).within({ edge: key.edge, stage: this.identity.stage }));
    }
  }

  #open(flow: IncomingFlow, session: ProducerSession, open: OpenEdge): void {
    if (open.connector !== Connector.GRPC) {
      const message = `${this.identity.replica} reads by the connector grpc alone`;
      throw failure(status.FAILED_PRECONDITION, "CONNECTOR_UNAVAILABLE", message);
    }
    if (flow.incarnation && flow.incarnation !== session.incarnation) {
      const message = `edge ${flow.key.edge} was opened by another incarnation of ${session.producer}`;
      throw failure(status.FAILED_PRECONDITION, "STALE_INCARNATION", message);
    }
    flow.open(session, open);
  }

  /** Returns the flow of an item. Answers the item instead if the flow is over or unknown. */
  #flowOf(session: ProducerSession, key: EdgeKey): IncomingFlow | undefined {
    const flow = this.#flows.get(idOf(key));
    const isExpected = flow?.producer === session.producer;
    if (isExpected && flow.error === undefined) return flow;
    const past = this.#past.get(idOf(key));
    const outcome = isExpected ? flow.error : past?.producer === session.producer ? past.outcome : undefined;
    if (outcome === "committed") {
      session.reply({ $case: "commit", value: { key } });
    } else {
      const error = errorToWire(outcome ?? this.#unknown(key));
      session.reply({ $case: "rejected", value: { key, error } });
    }
    return undefined;
  }

  #unknown(key: EdgeKey): StagemeshError {
    const metadata = { edge: key.edge, stage: this.identity.stage };
    for (const { key: other } of this.#flows.values()) {
      if (other.requestId === key.requestId && other.edge === key.edge && other.attempt > key.attempt) {
        const message = `edge ${key.edge} is in attempt ${other.attempt}, not ${key.attempt}`;
        return failure(status.FAILED_PRECONDITION, "STALE_ATTEMPT", message, metadata);
      }
    }
    const message = `${this.identity.replica} does not expect attempt ${key.attempt} of edge ${key.edge}`;
    return failure(status.NOT_FOUND, "UNKNOWN_FLOW", message, metadata);
  }
}

function noHello(message: string): StagemeshError {
  return failure(status.INVALID_ARGUMENT, "NO_HELLO", message);
}

/** A stream of a producer. Sends the replies that are due at the same time in one message. */
class ProducerSession implements Session {
  #replies: PutReply[] = [];

  constructor(
    readonly stream: Stream,
    readonly producer: string,
    readonly incarnation: string,
  ) {}

  reply(reply: NonNullable<PutReply["reply"]>): void {
    if (this.#replies.length === 0) setImmediate(() => this.#flush());
    this.#replies.push(PutReply.create({ reply }));
  }

  #flush(): void {
    const replies = this.#replies;
    this.#replies = [];
    if (!this.stream.cancelled && this.stream.writable) this.stream.write(PutChunkResponse.create({ replies }));
  }
}
