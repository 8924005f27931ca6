import { status } from "@grpc/grpc-js";
import { errorFromWire, errorToWire, failure, type StagemeshError } from "stagemesh/errors";
import type { Chunk, EdgeKey } from "stagemesh/v1/chunk";
import { ChunkData, Connector } from "stagemesh/v1/chunk";
import { type CreditGrant, type EdgeOpened, PutItem, type PutReply } from "stagemesh/v1/stage";
import { Tensor } from "stagemesh/v1/tensor";
import type { Chunker } from "./chunking.js";
import { FlowDigest } from "./digest.js";
import { isRecoverable, LOST_PEER_MS, Signal } from "./flows.js";
import { bytesOf, invalidChunk, type Packet } from "./packets.js";

const FRAGMENT_BYTES = 256 * 1024;
const MAX_RESYNCS = 10;
const LONGEST_SILENCE_MS = 30_000;

/** The largest number of bytes of delivered chunks that an edge retains for another consumer. */
const RETAINED_BYTES = 64 * 1024 * 1024;

type Content = Packet | NonNullable<Chunk["content"]>;

interface SentChunk {
  readonly content: Content;
  readonly sizeBytes: number;
  /** The payload bytes of the flow up to and including this chunk. */
  readonly endBytes: number;
}

/** The connection to a consumer, as a flow sees it. */
export interface Link {
  readonly isReady: boolean;
  readonly inlineLimitBytes: number;
  readonly silenceMs: number;
  put(item: NonNullable<PutItem["item"]>): void;
  remove(flow: OutgoingFlow): void;
}

/** The packets that a step sends over an edge. It outlives the attempts of the edge's consumer. */
export class OutgoingEdge {
  readonly changed = new Signal();
  readonly usage = { chunks: 0n, sizeBytes: 0n };
  flow: OutgoingFlow | undefined;
  isCommitted = false;
  #chunks: SentChunk[] = [];
  /** The number of the first chunk that is retained. */
  #firstSeq = 0;
  #retainedBytes = 0;
  #endBytes = 0;
  #isClosed = false;
  #aborted: StagemeshError | undefined;
  readonly #digest = new FlowDigest();

  constructor(
    readonly name: string,
    readonly chunker: Chunker,
    /** The names of the tensors to send. Empty for all. */
    readonly tensors: readonly string[],
    /** Called when no other consumer can continue the edge. */
    readonly onFailed: (error: StagemeshError) => void,
  ) {}

  /** The number of the next chunk. */
  get nextSeq(): number {
    return this.#firstSeq + this.#chunks.length;
  }

  get isClosed(): boolean {
    return this.#isClosed;
  }

  chunk(seq: number): SentChunk | undefined {
    return this.#chunks[seq - this.#firstSeq];
  }

  /** Sends a packet. Resolves when the consumer's credit has sufficed. Throws the error of the flow. */
  async send(packet: Packet): Promise<void> {
    const { tensors, metadata } = packet;
    const selected = this.tensors.length === 0 ? tensors : tensors.filter(({ name }) => this.tensors.includes(name));
    for (const chunk of this.chunker.add({ tensors: selected, metadata })) this.#push(chunk);
    await this.#until((flow) => flow.sentSeq === this.nextSeq);
  }

  /** Ends the flow. Resolves when all of it was delivered. Throws the error of the flow. */
  async finish(): Promise<void> {
    for (const chunk of this.chunker.finish()) this.#push(chunk);
    const end = { count: this.#digest.count, digest: this.#digest.finish() };
    this.#append({ content: { $case: "end", value: end }, sizeBytes: 0, endBytes: this.#endBytes });
    this.#isClosed = true;
    await this.#until((flow) => flow.ackedSeq === this.nextSeq);
  }

  /** Ends the flow with an error. The consumer receives it after the chunks for which there is credit. */
  abort(error: StagemeshError): void {
    this.#aborted = error;
    if (!this.#isClosed) {
      this.#isClosed = true;
      while (this.flow !== undefined && this.nextSeq > this.flow.sentSeq && this.#chunks.length > 0) this.#chunks.pop();
      this.#append({ content: { $case: "abort", value: { error: errorToWire(error) } }, sizeBytes: 0, endBytes: 0 });
    }
    if (this.flow?.error !== undefined) this.release();
    this.changed.fire();
  }

  /** Throws CHUNK_GONE if another consumer could not receive all chunks. */
  checkRetained(): void {
    if (this.#firstSeq === 0 && !this.isCommitted) return;
    const message = `the first chunks of edge ${this.name} are no longer retained`;
    throw failure(status.FAILED_PRECONDITION, "CHUNK_GONE", message, { edge: this.name });
  }

  /** Called by the flow when chunks were delivered. */
  delivered(seq: number): void {
    while (this.#retainedBytes > RETAINED_BYTES && this.#firstSeq < seq) {
      this.#retainedBytes -= this.#chunks.shift()?.sizeBytes ?? 0;
      this.#firstSeq += 1;
    }
    this.changed.fire();
  }

  committed(): void {
    this.isCommitted = true;
    this.release();
  }

  /** Drops all chunks. */
  release(): void {
    this.#firstSeq = this.nextSeq;
    this.#chunks = [];
    this.changed.fire();
  }

  #push(packet: Packet): void {
    const sizeBytes = bytesOf(packet);
    this.#endBytes += sizeBytes;
    this.#digest.add(packet.tensors);
    this.usage.chunks += 1n;
    this.usage.sizeBytes += BigInt(sizeBytes);
    this.#append({ content: packet, sizeBytes, endBytes: this.#endBytes });
  }

  #append(chunk: SentChunk): void {
    this.#chunks.push(chunk);
    this.#retainedBytes += chunk.sizeBytes;
    this.flow?.pump();
  }

  /** Waits until a condition holds for the present flow. A failed flow has some time to be replaced. */
  async #until(holds: (flow: OutgoingFlow) => boolean): Promise<void> {
    let failed: OutgoingFlow | undefined;
    let lostUntil = 0;
    for (;;) {
      const { flow } = this;
      if (this.#aborted !== undefined) throw this.#aborted;
      if (this.isCommitted || (flow && !flow.error && holds(flow))) return;
      if (flow?.error !== undefined && flow !== failed) {
        if (!isRecoverable(flow.error)) throw flow.error;
        failed = flow;
        lostUntil = Date.now() + LOST_PEER_MS;
      }
      const isInTime = await this.changed.next(flow?.error === undefined ? undefined : lostUntil - Date.now());
      if (!isInTime && this.flow === failed && failed?.error !== undefined) throw failed.error;
    }
  }
}

/** The flow of one attempt of an edge to one consumer. */
export class OutgoingFlow {
  error: StagemeshError | undefined;
  /** The incarnation of the consumer that has opened the flow. Empty before. */
  incarnation = "";
  /** The number of the next chunk to send. */
  sentSeq = 0;
  /** All chunks with lower numbers were delivered. */
  ackedSeq = 0;
  #phase: "waiting" | "opening" | "open" | "over" = "waiting";
  #openings = 0;
  #windowBytes = 0;
  #limitBytes = 0;
  #limitChunks = 0;
  #demandedSeq = -1;
  #resyncs = 0;
  #heardAt = Date.now();
  #silenceMs: number;

  constructor(
    readonly key: EdgeKey,
    readonly edge: OutgoingEdge,
    readonly link: Link,
  ) {
    this.#silenceMs = link.silenceMs;
  }

  /** Opens the flow on the link's present stream. */
  open(): void {
    if (this.#phase === "over") return;
    this.#phase = "opening";
    this.#openings += 1;
    this.#heardAt = Date.now();
    this.link.put({ $case: "open", value: { key: this.key, connector: Connector.GRPC, opening: this.#openings } });
  }

  /** Called when the stream has ended. */
  disconnect(): void {
    if (this.#phase !== "over") this.#phase = "waiting";
  }

  /** Sends the chunks for which there is credit. */
  pump(): void {
    while (this.#phase === "open") {
      const chunk = this.edge.chunk(this.sentSeq);
      if (chunk === undefined) break;
      if (!("$case" in chunk.content)) {
        if (chunk.endBytes > this.#limitBytes) {
          this.#demandCredit(chunk.sizeBytes);
          break;
        }
        // All chunks before it contain data, too.
        if (this.sentSeq >= this.#limitChunks) break;
      }
      this.#put(chunk);
      this.sentSeq += 1;
    }
    this.edge.changed.fire();
  }

  /** Handles a reply about this flow. */
  take(reply: Exclude<NonNullable<PutReply["reply"]>, { $case: "offerAnswer" | "release" | "accept" }>): void {
    this.#heardAt = Date.now();
    this.#silenceMs = this.link.silenceMs;
    switch (reply.$case) {
      case "opened":
        this.#opened(reply.value);
        break;
      case "ack":
        this.#acknowledge(reply.value.nextSeq);
        this.#grant(reply.value);
        break;
      case "credit":
        this.#grant(reply.value);
        break;
      case "commit":
        this.#committed();
        break;
      case "rejected":
        this.fail(errorFromWire(reply.value.error));
        break;
      case "resync":
        this.#resyncs += 1;
        if (this.#resyncs > MAX_RESYNCS) {
          this.fail(invalidChunk(`the consumer lacks messages: ${reply.value.error?.message ?? ""}`));
        } else if (this.link.isReady) {
          this.open();
        }
        break;
    }
  }

  /** Opens the flow again if an answer is due and the consumer has been silent for too long. */
  checkSilence(): void {
    const isAnswerDue =
      this.#phase === "opening" || this.edge.isClosed || this.ackedSeq < this.sentSeq || this.sentSeq < this.edge.nextSeq;
    if (!isAnswerDue) this.#heardAt = Date.now();
    if (this.#phase === "over" || Date.now() - this.#heardAt < this.#silenceMs) return;
    this.#silenceMs = Math.min(2 * this.#silenceMs, LONGEST_SILENCE_MS);
    this.open();
  }

  fail(error: StagemeshError): void {
    if (this.#phase === "over") return;
    this.#over();
    this.error = error.within({ edge: this.key.edge });
    if (!isRecoverable(error)) {
      if (this.edge.isClosed) this.edge.release();
      this.edge.onFailed(this.error);
    }
    this.edge.changed.fire();
  }

  #over(): void {
    this.#phase = "over";
    this.link.remove(this);
  }

  #opened(opened: EdgeOpened): void {
    const { opening, nextSeq, windowBytes } = opened;
    if (opening !== this.#openings || this.#phase !== "opening") return;
    if (Number(nextSeq) < this.ackedSeq) {
      this.fail(invalidChunk(`the consumer of edge ${this.key.edge} lacks chunk ${nextSeq}, which it has acknowledged`));
      return;
    }
    this.#phase = "open";
    this.#acknowledge(nextSeq);
    this.sentSeq = Number(nextSeq);
    this.#demandedSeq = -1;
    this.#windowBytes = Number(windowBytes);
    this.#grant(opened);
    this.pump();
  }

  #acknowledge(nextSeq: bigint): void {
    const seq = Number(nextSeq);
    if (seq > this.edge.nextSeq) {
      this.fail(invalidChunk(`the consumer of edge ${this.key.edge} acknowledged chunk ${seq}, which was never sent`));
    }
    if (seq <= this.ackedSeq) return;
    this.ackedSeq = seq;
    this.#resyncs = 0;
    const isAbortDelivered = this.edge.chunk(seq - 1)?.content;
    if (isAbortDelivered && "$case" in isAbortDelivered && isAbortDelivered.$case === "abort") {
      this.#over();
      this.edge.release();
    }
    this.edge.delivered(seq);
  }

  #committed(): void {
    if (!this.edge.isClosed || this.sentSeq < this.edge.nextSeq) {
      this.fail(invalidChunk(`the consumer of edge ${this.key.edge} has committed it before its end`));
      return;
    }
    this.#over();
    this.edge.committed();
  }

  #grant({ creditLimitBytes, creditLimitChunks }: Partial<CreditGrant>): void {
    this.#limitBytes = Math.max(this.#limitBytes, Number(creditLimitBytes ?? 0n));
    this.#limitChunks = Math.max(this.#limitChunks, Number(creditLimitChunks ?? 0n));
    this.pump();
  }

  /** Asks for credit for a chunk that is larger than half the window. Otherwise, credit comes as the consumer reads. */
  #demandCredit(sizeBytes: number): void {
    if (this.#demandedSeq === this.sentSeq || 2 * sizeBytes <= this.#windowBytes) return;
    this.#demandedSeq = this.sentSeq;
    this.link.put({ $case: "demand", value: { key: this.key, sizeBytes: BigInt(sizeBytes) } });
  }

  #put({ content, sizeBytes }: SentChunk): void {
    const seq = BigInt(this.sentSeq);
    if ("$case" in content) {
      this.link.put({ $case: "chunk", value: { key: this.key, seq, content } });
      return;
    }
    const isInline = sizeBytes <= this.link.inlineLimitBytes;
    const value = dataOf(content, sizeBytes, isInline);
    if (!isInline) {
      const bytes = Buffer.concat(content.tensors.map(({ data }) => data));
      for (let offset = 0; offset < sizeBytes; offset += FRAGMENT_BYTES) {
        const fragment = { key: this.key, seq, totalBytes: BigInt(sizeBytes), offset: BigInt(offset) };
        const payload = bytes.subarray(offset, offset + FRAGMENT_BYTES);
        this.link.put({ $case: "fragment", value: { ...fragment, payload, padding: new Uint8Array() } });
      }
    }
    this.link.put({ $case: "chunk", value: { key: this.key, seq, content: { $case: "data", value } } });
  }
}

/** Describes a packet. Its bytes are inline, or were sent as fragments. */
function dataOf(packet: Packet, sizeBytes: number, isInline: boolean): ChunkData {
  let offset = 0;
  const tensors = packet.tensors.map(({ name, dtype, shape, data, firstRow = 0 }) => {
    const tensor = Tensor.create({ name, dtype, shape: shape.map(BigInt), firstRow: BigInt(firstRow) });
    if (data.length > 0 && isInline) tensor.location = { $case: "inline", value: data };
    else if (data.length > 0) {
      const value = { offset: BigInt(offset), sizeBytes: BigInt(data.length) };
      tensor.location = { $case: "streamed", value };
    }
    offset += data.length;
    return tensor;
  });
  const metadata = Object.fromEntries(Object.entries(packet.metadata).map(([name, kind]) => [name, { kind }]));
  return ChunkData.create({ ...packet, tensors, metadata, sizeBytes: BigInt(sizeBytes) });
}
