import { status } from "@grpc/grpc-js";
import { errorFromWire, errorToWire, failure, type StagemeshError } from "stagemesh/errors";
import { type Chunk, type ChunkData, type ChunkEnd, type ChunkFragment, type EdgeKey } from "stagemesh/v1/chunk";
import { type OpenEdge, type PutReply } from "stagemesh/v1/stage";
import type { Tensor } from "stagemesh/v1/tensor";
import { unknownKind, unknownKindError } from "stagemesh/protocol";
import { FlowDigest } from "./digest.js";
import { isRecoverable, LOST_PEER_MS, NOT_READ, Signal } from "./flows.js";
import { bytesOf, invalidChunk, type NamedTensor, type Packet, rowsOf, sizeOf, sliceRows } from "./packets.js";

const MAX_RESYNCS = 3;
const MAX_TENSORS = 1024;

export interface CreditLimits {
  /** The payload bytes that a producer may send ahead of the reader. */
  readonly windowBytes: number;
  /** The largest chunk. */
  readonly maxChunkBytes: number;
}

/** A PutChunk stream of a producer, as a flow sees it. */
export interface Session {
  readonly producer: string;
  readonly incarnation: string;
  /** The highest number of a transfer on this stream. */
  lastTransferId: bigint;
  reply(reply: NonNullable<PutReply["reply"]>): void;
}

interface Transfer {
  readonly id: bigint;
  readonly totalBytes: number;
  readonly parts: Uint8Array[];
  receivedBytes: number;
}

/** The flow of one attempt. Its packets go to an `IncomingEdge`, which outlives it. */
export class IncomingFlow {
  session: Session | undefined;
  /** The incarnation of the producer that has opened the flow. */
  incarnation = "";
  error: StagemeshError | undefined;
  #phase: "waiting" | "open" | "resyncing" | "ended" | "over" = "waiting";
  #nextSeq = 0n;
  #resyncs = 0;
  #limitBytes: number;
  #receivedBytes = 0;
  #readBytes = 0;
  #demandedBytes = 0;
  #transfer: Transfer | undefined;
  #lostTimer: NodeJS.Timeout | undefined;
  readonly #digest = new FlowDigest();

  constructor(
    readonly key: EdgeKey,
    readonly producer: string,
    readonly edge: IncomingEdge,
    readonly limits: CreditLimits,
    /** Called once, when the flow is committed or rejected for good. */
    readonly onOver: (flow: IncomingFlow, outcome: StagemeshError | "committed") => void,
  ) {
    this.#limitBytes = limits.windowBytes;
  }

  get hasEnded(): boolean {
    return this.#phase === "ended";
  }

  // -- the producer's items

  open(session: Session, open: OpenEdge): void {
    if (this.#phase === "waiting" || this.#phase === "resyncing") this.#phase = "open";
    this.session = session;
    this.incarnation = session.incarnation;
    this.#transfer = undefined;
    clearTimeout(this.#lostTimer);
    const { connector, opening } = open;
    const credit = { nextSeq: this.#nextSeq, creditLimitBytes: BigInt(this.#limitBytes) };
    session.reply({ $case: "opened", value: { key: this.key, ...credit, connector, opening } });
  }

  takeChunk(session: Session, chunk: Chunk): void {
    if (!this.#isOpenOn(session) || chunk.seq < this.#nextSeq) return;
    if (chunk.seq > this.#nextSeq || this.#phase === "ended") {
      this.#resync(session, "SEQUENCE_GAP", `chunk ${chunk.seq} arrived when ${this.#nextSeq} was due`);
      return;
    }
    switch (chunk.content?.$case) {
      case "data": {
        const packet = this.#packetOf(session, chunk.content.value);
        if (packet === undefined) return;
        this.#receivedBytes += bytesOf(packet);
        this.#digest.add(packet.tensors);
        this.edge.accept(packet, this);
        break;
      }
      case "end":
        this.#takeEnd(chunk.content.value);
        break;
      case "abort":
        this.fail(errorFromWire(chunk.content.value.error).within({ edge: this.key.edge, replica: this.producer }));
        break;
      case undefined: {
        const kind = unknownKind(chunk);
        throw kind === undefined ? invalidChunk("a chunk has no content") : unknownKindError(this.producer, "Chunk", kind);
      }
    }
    this.#nextSeq += 1n;
    this.#resyncs = 0;
    session.reply({ $case: "ack", value: { key: this.key, nextSeq: this.#nextSeq, creditLimitBytes: 0n } });
    if (this.hasEnded) this.edge.end(this);
  }

  takeFragment(session: Session, fragment: ChunkFragment): void {
    if (!this.#isOpenOn(session)) return;
    let transfer = this.#transfer;
    if (transfer?.id !== fragment.transferId) {
      if (fragment.transferId <= session.lastTransferId) return; // a repeated fragment of an earlier transfer
      session.lastTransferId = fragment.transferId;
      transfer = { id: fragment.transferId, totalBytes: Number(fragment.totalBytes), parts: [], receivedBytes: 0 };
      this.#transfer = transfer;
      this.#checkCredit(transfer.totalBytes);
    }
    const offset = Number(fragment.offset);
    if (offset < transfer.receivedBytes) return; // a repeated fragment
    if (offset > transfer.receivedBytes) {
      this.#resync(session, "FRAGMENT_GAP", `the fragment at ${offset} arrived when ${transfer.receivedBytes} was due`);
      return;
    }
    transfer.parts.push(fragment.payload);
    transfer.receivedBytes += fragment.payload.length;
    if (transfer.receivedBytes > transfer.totalBytes) throw invalidChunk("the fragments exceed their transfer");
  }

  demand(session: Session, sizeBytes: number): void {
    if (!this.#isOpenOn(session)) return;
    if (sizeBytes > this.limits.maxChunkBytes) {
      const message = `a chunk of ${sizeBytes} bytes exceeds the consumer's limit of ${this.limits.maxChunkBytes}`;
      throw failure(status.INVALID_ARGUMENT, "CHUNK_TOO_LARGE", message);
    }
    this.#demandedBytes = sizeBytes;
    this.consume(0);
  }

  // -- the reader

  /** Counts bytes as read, and raises the credit limit if it is worth a message. */
  consume(sizeBytes: number): void {
    this.#readBytes += sizeBytes;
    let limitBytes = this.#readBytes + this.limits.windowBytes;
    let stepBytes = Math.max(1, this.limits.windowBytes / 4);
    if (this.#demandedBytes > 0 && this.#readBytes === this.#receivedBytes) {
      limitBytes = Math.max(limitBytes, this.#receivedBytes + this.#demandedBytes);
      stepBytes = 1;
      this.#demandedBytes = 0;
    }
    if (limitBytes - this.#limitBytes < stepBytes) return;
    this.#limitBytes = limitBytes;
    // Otherwise, the answer to the next OpenEdge contains the limit.
    if (this.#phase !== "open") return;
    this.session?.reply({ $case: "credit", value: { key: this.key, creditLimitBytes: BigInt(limitBytes) } });
  }

  /** Tells the producer that the flow was read to its end. */
  commit(): void {
    if (this.#phase === "over") return;
    this.#phase = "over";
    clearTimeout(this.#lostTimer);
    this.session?.reply({ $case: "commit", value: { key: this.key } });
    this.onOver(this, "committed");
  }

  /** Ends the flow before its end was read. `error` is what the producer receives, unless the flow has failed. */
  close(error: StagemeshError): void {
    if (this.#phase === "over") return;
    if (this.error === undefined) {
      this.session?.reply({ $case: "rejected", value: { key: this.key, error: errorToWire(error) } });
    }
    this.#phase = "over";
    clearTimeout(this.#lostTimer);
    this.onOver(this, this.error ?? error);
  }

  // -- failures

  /** Ends the flow because of an error of the producer's items, which both ends receive. */
  reject(session: Session, error: StagemeshError): void {
    session.reply({ $case: "rejected", value: { key: this.key, error: errorToWire(error) } });
    this.fail(error);
  }

  /** Ends the flow. The reader receives the error after the packets that have arrived. */
  fail(error: StagemeshError): void {
    if (this.error !== undefined || this.#phase === "ended" || this.#phase === "over") return;
    this.error = error;
    clearTimeout(this.#lostTimer);
    this.edge.changed.fire();
  }

  /** Called when a stream has ended. The producer may return on another one. */
  detach(session: Session): void {
    if (this.session !== session) return;
    this.session = undefined;
    if (this.#phase === "open") this.#phase = "waiting";
    this.#awaitProducer();
  }

  lost(): StagemeshError {
    const message = `replica ${this.producer} was lost before chunk ${this.#nextSeq} of edge ${this.key.edge}`;
    return failure(status.UNAVAILABLE, "PEER_LOST", message, { edge: this.key.edge, replica: this.producer });
  }

  #awaitProducer(): void {
    if (this.error !== undefined || this.#phase === "ended" || this.#phase === "over") return;
    clearTimeout(this.#lostTimer);
    this.#lostTimer = setTimeout(() => this.fail(this.lost()), LOST_PEER_MS);
  }

  #isOpenOn(session: Session): boolean {
    if (this.#phase === "resyncing") return false;
    if (this.session === session) return true;
    // If another stream carries the flow, this item is a late one.
    if (this.session === undefined) this.#resync(session, "NOT_OPENED", "the flow is not open on this stream");
    return false;
  }

  #resync(session: Session, reason: "FRAGMENT_GAP" | "NOT_OPENED" | "SEQUENCE_GAP", message: string): void {
    const error = failure(status.INVALID_ARGUMENT, reason, message, { edge: this.key.edge });
    this.#resyncs += 1;
    if (this.#resyncs > MAX_RESYNCS) throw error;
    if (this.#phase !== "ended") this.#phase = "resyncing";
    session.reply({ $case: "resync", value: { key: this.key, failed: 0, error: errorToWire(error) } });
    this.#awaitProducer();
  }

  #checkCredit(sizeBytes: number): void {
    const creditBytes = this.#limitBytes - this.#receivedBytes;
    if (sizeBytes <= creditBytes) return;
    const message = `chunk ${this.#nextSeq} has ${sizeBytes} bytes, but only ${creditBytes} were granted`;
    throw failure(status.INVALID_ARGUMENT, "CREDIT_EXCEEDED", message);
  }

  #takeEnd(end: ChunkEnd): void {
    const digest = this.#digest.finish();
    if (end.count !== this.#digest.count || !Buffer.from(digest).equals(end.digest)) {
      const message = `the flow ended after ${end.count} chunks, but ${this.#digest.count} arrived, or they differ`;
      throw failure(status.INVALID_ARGUMENT, "DIGEST_MISMATCH", message);
    }
    this.#phase = "ended";
  }

  /** Returns the packet of a chunk, or undefined if fragments are missing. Throws INVALID_CHUNK. */
  #packetOf(session: Session, data: ChunkData): Packet | undefined {
    if (data.tensors.length > MAX_TENSORS) throw invalidChunk(`a chunk has more than ${MAX_TENSORS} tensors`);
    if (new Set(data.tensors.map(({ name }) => name)).size < data.tensors.length) {
      throw invalidChunk("two tensors of a chunk have the same name");
    }
    this.#checkCredit(Number(data.sizeBytes));
    const tensors: NamedTensor[] = [];
    let transferred: Buffer | undefined;
    for (const tensor of data.tensors) {
      if (tensor.location?.$case === "streamed" && transferred === undefined) {
        const transfer = this.#transfer;
        if (transfer?.id !== tensor.location.value.transferId || transfer.receivedBytes < transfer.totalBytes) {
          this.#resync(session, "FRAGMENT_GAP", `chunk ${this.#nextSeq} arrived before its fragments`);
          return undefined;
        }
        transferred = Buffer.concat(transfer.parts);
      }
      tensors.push(this.#tensorOf(tensor, transferred));
    }
    this.#transfer = undefined;
    const metadata: Record<string, NonNullable<(typeof data.metadata)[string]["kind"]>> = {};
    for (const [name, { kind }] of Object.entries(data.metadata)) if (kind !== undefined) metadata[name] = kind;
    const packet = { tensors, metadata };
    if (bytesOf(packet) === Number(data.sizeBytes)) return packet;
    throw invalidChunk(`a chunk has ${bytesOf(packet)} bytes, but its size is given as ${data.sizeBytes}`);
  }

  #tensorOf({ name, dtype, shape: lengths, location, ...rest }: Tensor, transferred?: Buffer): NamedTensor {
    const shape = lengths.map(Number);
    let data: Uint8Array = new Uint8Array();
    switch (location?.$case) {
      case "inline":
        data = location.value;
        break;
      case "streamed": {
        const offset = Number(location.value.offset);
        data = transferred?.subarray(offset, offset + Number(location.value.sizeBytes)) ?? data;
        break;
      }
      case "shm":
        throw invalidChunk(`tensor ${name} is in an arena, which the connector grpc cannot read`);
      case "handover":
        throw failure(status.UNIMPLEMENTED, "TICKET_REFUSED", `this stage accepts no tickets, such as ${name}`);
      case undefined: {
        const kind = unknownKind(rest);
        if (kind !== undefined && sizeOf({ name, dtype, shape }) > 0) throw unknownKindError(this.producer, "Tensor", kind);
      }
    }
    const tensor = { name, dtype, shape, data };
    if (sizeOf(tensor) === data.length) return tensor;
    throw invalidChunk(`tensor ${name} has ${data.length} bytes, but its shape needs ${sizeOf(tensor)}`);
  }
}

/** The packets of an edge for the function of a step, over the attempts of its producer. */
export class IncomingEdge implements AsyncIterable<Packet> {
  readonly changed = new Signal();
  flow: IncomingFlow | undefined;
  #queue: { packet: Packet; sizeBytes: number; flow: IncomingFlow }[] = [];
  #hasEnded = false;
  #stopped: StagemeshError | undefined;
  #hasContext = false;
  /** The rows of each tensor that have arrived, over all attempts. */
  readonly #rows = new Map<string, number>();
  /** The rows that the present attempt has sent, until it has repeated all that have arrived before. */
  #repeated: Map<string, number> | undefined;

  constructor(readonly name: string) {}

  async *[Symbol.asyncIterator](): AsyncGenerator<Packet, void, void> {
    for (;;) {
      const next = this.#queue.shift();
      if (this.#stopped !== undefined) throw this.#stopped;
      if (next !== undefined) {
        next.flow.consume(next.sizeBytes);
        yield next.packet;
      } else if (this.#hasEnded) {
        this.flow?.commit();
        return;
      } else {
        await this.#wait();
      }
    }
  }

  /** Ends the edge: commits a flow that was read to its end, and rejects any other. */
  close(error: StagemeshError): void {
    this.#stopped = error;
    this.#queue = [];
    this.changed.fire();
    const isLost = isRecoverable(error);
    const message = isLost ? `the consumer of edge ${this.name} has ended` : `the consumer of edge ${this.name} stopped reading`;
    const context = { edge: this.name };
    this.flow?.close(
      isLost
        ? failure(status.UNAVAILABLE, "PEER_LOST", message, context)
        : failure(status.CANCELLED, NOT_READ, message, context),
    );
  }

  // -- RebindStep

  /** Throws ROWS_MISSING if a producer that begins at these rows would leave a gap. */
  checkRows(firstRows: Readonly<Record<string, bigint>>): void {
    if (this.#hasEnded) return;
    for (const [tensor, first] of Object.entries(firstRows)) {
      const rows = this.#hasContext ? 0 : (this.#rows.get(tensor) ?? 0);
      if (first <= rows) continue;
      const message = `edge ${this.name}: the new flow begins at row ${first} of ${tensor}, but only ${rows} have arrived`;
      const metadata = { edge: this.name, tensor, rows: String(rows) };
      throw failure(status.FAILED_PRECONDITION, "ROWS_MISSING", message, metadata);
    }
  }

  /** Continues the edge with a new flow. Packets that have arrived remain. */
  rebind(flow: IncomingFlow, firstRows: Readonly<Record<string, bigint>>): void {
    const previous = this.flow;
    this.flow = flow;
    if (previous?.hasEnded) previous.commit();
    else {
      const message = `attempt ${previous?.key.attempt} of edge ${this.name} was replaced`;
      previous?.close(failure(status.FAILED_PRECONDITION, "STALE_ATTEMPT", message, { edge: this.name }));
    }
    this.#repeated = new Map([...this.#rows.keys()].map((tensor) => [tensor, Number(firstRows[tensor] ?? 0n)]));
    this.#endRepetition();
    this.changed.fire();
  }

  // -- the flow's packets

  accept(packet: Packet, flow: IncomingFlow): void {
    const sizeBytes = bytesOf(packet);
    const added = this.#hasEnded ? undefined : this.#withoutRepetition(packet);
    if (added === undefined) flow.consume(sizeBytes);
    else this.#queue.push({ packet: added, sizeBytes, flow });
    this.changed.fire();
  }

  end(flow: IncomingFlow): void {
    if (this.#hasEnded) flow.commit();
    else if (this.#repeated !== undefined) {
      flow.error = this.#attemptsDiffer("sent fewer rows than the previous one");
    } else this.#hasEnded = true;
    this.changed.fire();
  }

  #withoutRepetition(packet: Packet): Packet | undefined {
    this.#hasContext ||= "context_frames" in packet.metadata;
    const repeated = this.#repeated;
    const skips = packet.tensors.map((tensor) => {
      const arrived = this.#rows.get(tensor.name) ?? 0;
      const first = repeated === undefined ? arrived : (repeated.get(tensor.name) ?? 0);
      const end = first + rowsOf(tensor);
      repeated?.set(tensor.name, end);
      this.#rows.set(tensor.name, Math.max(arrived, end));
      return Math.min(rowsOf(tensor), Math.max(0, arrived - first));
    });
    if (repeated === undefined) return packet;
    this.#endRepetition();
    if (packet.tensors.every((tensor, index) => skips[index] === rowsOf(tensor))) return undefined;
    if (skips.every((skip) => skip === 0)) return packet;
    const context = packet.metadata["context_frames"];
    if (context?.$case === "integer" && context.value > 0n) {
      throw this.#attemptsDiffer("cuts chunks with left context at other rows");
    }
    const tensors = packet.tensors
      .map((tensor, index) => ({ tensor, skip: skips[index] ?? 0 }))
      .filter(({ tensor, skip }) => tensor.shape.length > 0 || skip === 0)
      .map(({ tensor, skip }) => (skip > 0 ? sliceRows(tensor, skip, rowsOf(tensor)) : tensor));
    const start = packet.metadata["token_start"];
    if (start?.$case !== "integer") return { ...packet, tensors };
    const moved = { $case: "integer" as const, value: start.value + BigInt(skips[0] ?? 0) };
    return { tensors, metadata: { ...packet.metadata, token_start: moved } };
  }

  #endRepetition(): void {
    const isDone = [...this.#rows].every(([tensor, rows]) => (this.#repeated?.get(tensor) ?? 0) >= rows);
    if (isDone) this.#repeated = undefined;
  }

  #attemptsDiffer(difference: string): StagemeshError {
    const message = `edge ${this.name}: the new attempt of its producer ${difference}`;
    return failure(status.INVALID_ARGUMENT, "ATTEMPTS_DIFFER", message, { edge: this.name });
  }

  /** Waits for a change. Throws the flow's error if no other producer takes over. */
  async #wait(): Promise<void> {
    const flow = this.flow;
    const error = flow?.error;
    if (error === undefined) {
      await this.changed.next();
      return;
    }
    if (!isRecoverable(error)) throw error;
    const end = Date.now() + LOST_PEER_MS;
    while (this.flow === flow && this.#stopped === undefined) {
      if (!(await this.changed.next(end - Date.now()))) throw error;
    }
  }
}
