import { crc32 } from "node:zlib";
import { status } from "@grpc/grpc-js";
import { errorFromWire, errorToWire, failure, type StagemeshError } from "stagemesh/errors";
import {
  ChecksumAlgorithm,
  type Chunk,
  type ChunkData,
  type ChunkEnd,
  type ChunkFragment,
  type EdgeKey,
} from "stagemesh/v1/chunk";
import { type OpenEdge, type PutReply } from "stagemesh/v1/stage";
import type { AcceptedTensor } from "stagemesh/v1/signature";
import type { Tensor, TensorSpec } from "stagemesh/v1/tensor";
import { unknownKind, unknownKindError } from "stagemesh/protocol";
import { checkChunk } from "./checks.js";
import { FlowDigest } from "./digest.js";
import { isRecoverable, LOST_PEER_MS, NOT_READ, Signal } from "./flows.js";
import { bytesOf, invalidChunk, type NamedTensor, type Packet, rowsOf, sizeOf, sliceRows } from "./packets.js";

const MAX_RESYNCS = 3;
const MAX_FRAGMENT_BYTES = 1024 * 1024;

export interface CreditLimits {
  /** The payload bytes that a producer may send ahead of the reader. */
  readonly windowBytes: number;
  /** The chunks that a producer may send ahead of the reader. */
  readonly windowChunks: number;
  /** The largest chunk. */
  readonly maxChunkBytes: number;
}

/** A PutChunk stream of a producer, as a flow sees it. */
export interface Session {
  readonly producer: string;
  readonly incarnation: string;
  reply(reply: NonNullable<PutReply["reply"]>): void;
}

/** The fragments of the next chunk. */
interface Fragments {
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
  #limitChunks: number;
  #receivedBytes = 0;
  #readBytes = 0;
  #readChunks = 0;
  #demandedBytes = 0;
  #fragments: Fragments | undefined;
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
    this.#limitChunks = limits.windowChunks;
  }

  get hasEnded(): boolean {
    return this.#phase === "ended";
  }

  // -- the producer's items

  open(session: Session, open: OpenEdge): void {
    if (this.#phase === "waiting" || this.#phase === "resyncing") this.#phase = "open";
    this.session = session;
    this.incarnation = session.incarnation;
    this.#fragments = undefined;
    clearTimeout(this.#lostTimer);
    const { connector, opening } = open;
    const credit = { ...this.#limits, windowBytes: BigInt(this.limits.windowBytes) };
    const value = { key: this.key, nextSeq: this.#nextSeq, ...credit, connector, opening };
    session.reply({ $case: "opened", value });
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
    this.#fragments = undefined;
    const ack = { key: this.key, nextSeq: this.#nextSeq, creditLimitBytes: undefined, creditLimitChunks: undefined };
    session.reply({ $case: "ack", value: ack });
    if (this.hasEnded) this.edge.end(this);
  }

  takeFragment(session: Session, fragment: ChunkFragment): void {
    if (!this.#isOpenOn(session) || fragment.seq < this.#nextSeq) return;
    if (fragment.seq > this.#nextSeq || this.#phase === "ended") {
      this.#resync(session, "SEQUENCE_GAP", `a fragment of chunk ${fragment.seq} arrived when ${this.#nextSeq} was due`);
      return;
    }
    if (fragment.payload.length > MAX_FRAGMENT_BYTES) throw invalidChunk("a fragment has more than 1 MiB");
    const [offset, totalBytes] = [Number(fragment.offset), Number(fragment.totalBytes)];
    if (this.#fragments === undefined) this.#checkCredit(totalBytes);
    const fragments = (this.#fragments ??= { totalBytes, parts: [], receivedBytes: 0 });
    if (totalBytes !== fragments.totalBytes) throw invalidChunk("the fragments of a chunk state different sizes");
    if (offset < fragments.receivedBytes) return; // a repeated fragment
    const end = offset + fragment.payload.length;
    if (offset > fragments.receivedBytes || end > totalBytes) {
      const message = `the bytes ${offset} to ${end} arrived when ${fragments.receivedBytes} of ${totalBytes} had arrived`;
      this.#resync(session, "FRAGMENT_GAP", message);
      return;
    }
    fragments.parts.push(fragment.payload);
    fragments.receivedBytes = end;
  }

  demand(session: Session, sizeBytes: number): void {
    if (!this.#isOpenOn(session)) return;
    if (sizeBytes > this.limits.maxChunkBytes) {
      const message = `a chunk of ${sizeBytes} bytes exceeds the consumer's limit of ${this.limits.maxChunkBytes}`;
      throw failure(status.INVALID_ARGUMENT, "CHUNK_TOO_LARGE", message);
    }
    this.#demandedBytes = sizeBytes;
    this.consume(0, 0);
  }

  // -- the reader

  /** Counts what was read, and raises the credit limits if it is worth a message. */
  consume(sizeBytes: number, chunks = 1): void {
    this.#readBytes += sizeBytes;
    this.#readChunks += chunks;
    const { windowBytes, windowChunks } = this.limits;
    let limitBytes = Math.max(this.#limitBytes, this.#readBytes + windowBytes);
    const limitChunks = this.#readChunks + windowChunks;
    let isDue =
      limitBytes - this.#limitBytes >= Math.max(1, windowBytes / 4) ||
      limitChunks - this.#limitChunks >= Math.max(1, windowChunks / 4);
    if (this.#demandedBytes > 0 && this.#readBytes === this.#receivedBytes) {
      limitBytes = Math.max(limitBytes, this.#receivedBytes + this.#demandedBytes);
      isDue ||= limitBytes > this.#limitBytes;
      this.#demandedBytes = 0;
    }
    if (!isDue) return;
    this.#limitBytes = limitBytes;
    this.#limitChunks = limitChunks;
    // Otherwise, the answer to the next OpenEdge contains the limits.
    if (this.#phase !== "open") return;
    this.session?.reply({ $case: "credit", value: { key: this.key, ...this.#limits } });
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

  get #limits() {
    return { creditLimitBytes: BigInt(this.#limitBytes), creditLimitChunks: BigInt(this.#limitChunks) };
  }

  #checkCredit(sizeBytes: number): void {
    const creditBytes = this.#limitBytes - this.#receivedBytes;
    if (sizeBytes <= creditBytes && this.#digest.count < this.#limitChunks) return;
    const message = `chunk ${this.#nextSeq} has ${sizeBytes} bytes, but only ${creditBytes} in ${this.#limitChunks} chunks were granted`;
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
    checkChunk(data);
    this.#checkCredit(Number(data.sizeBytes));
    const isStreamed = data.tensors.some(({ location }) => location?.$case === "streamed");
    const fragments = this.#fragments;
    if (isStreamed && (fragments === undefined || fragments.receivedBytes < fragments.totalBytes)) {
      this.#resync(session, "FRAGMENT_GAP", `chunk ${this.#nextSeq} arrived before its fragments`);
      return undefined;
    }
    if (fragments !== undefined && fragments.totalBytes !== streamedBytesOf(data)) {
      throw invalidChunk("the fragments of a chunk have another size than its streamed tensors");
    }
    const streamed = isStreamed ? Buffer.concat(fragments?.parts ?? []) : undefined;
    const tensors = data.tensors.map((tensor) => this.#tensorOf(tensor, streamed));
    const metadata: Record<string, NonNullable<(typeof data.metadata)[string]["kind"]>> = {};
    for (const [name, { kind }] of Object.entries(data.metadata)) if (kind !== undefined) metadata[name] = kind;
    const { contextFrames, tokenStart, promptTokens, preview, engineSteps } = data;
    if (tensors.some((tensor) => rowsOf(tensor) < (contextFrames ?? 0))) {
      throw invalidChunk("the context of a chunk exceeds the rows of a tensor");
    }
    const packet = { tensors, metadata, contextFrames, tokenStart, promptTokens, preview, engineSteps };
    if (bytesOf(packet) !== Number(data.sizeBytes)) {
      throw invalidChunk(`a chunk has ${bytesOf(packet)} bytes, but its size is given as ${data.sizeBytes}`);
    }
    if (data.checksum?.algorithm === ChecksumAlgorithm.CRC32) {
      const value = tensors.reduce((sum, tensor) => crc32(tensor.data, sum), 0);
      if (BigInt(value) !== data.checksum.value) {
        throw failure(status.INVALID_ARGUMENT, "CHECKSUM_MISMATCH", "the bytes of a chunk were damaged on the way");
      }
    }
    return packet;
  }

  #tensorOf({ name, dtype, shape: lengths, location, firstRow, ...rest }: Tensor, streamed?: Buffer): NamedTensor {
    const shape = lengths.map(Number);
    let data: Uint8Array = new Uint8Array();
    switch (location?.$case) {
      case "inline":
        data = location.value;
        break;
      case "streamed": {
        const offset = Number(location.value.offset);
        data = streamed?.subarray(offset, offset + Number(location.value.sizeBytes)) ?? data;
        break;
      }
      case "shm":
      case "device": {
        const message = `this stage cannot read the memory of tensor ${name}`;
        throw failure(status.UNIMPLEMENTED, "UNKNOWN_KIND", message);
      }
      case "handover":
        throw failure(status.UNIMPLEMENTED, "TICKET_REFUSED", `this stage accepts no tickets, such as ${name}`);
      case undefined: {
        const kind = unknownKind(rest);
        if (kind !== undefined && sizeOf({ name, dtype, shape }) > 0) throw unknownKindError(this.producer, "Tensor", kind);
      }
    }
    const tensor = { name, dtype, shape, data, firstRow: Number(firstRow) };
    if (sizeOf(tensor) === data.length) return tensor;
    throw invalidChunk(`tensor ${name} has ${data.length} bytes, but its shape needs ${sizeOf(tensor)}`);
  }
}

/** Returns the bytes of a chunk's streamed tensors, whose regions follow each other. Throws INVALID_CHUNK. */
function streamedBytesOf({ tensors }: ChunkData): number {
  let end = 0;
  for (const { name, location } of tensors) {
    if (location?.$case !== "streamed") continue;
    const { offset, sizeBytes } = location.value;
    if (Number(offset) !== end) throw invalidChunk(`the region of tensor ${name} begins at ${offset}, not at ${end}`);
    end += Number(sizeBytes);
  }
  return end;
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
  /** The row after the last one that the present attempt has sent, for each tensor. */
  #reached = new Map<string, number>();
  /** The next row of the present producer, by the name of the tensor. */
  #sent = new Map<string, number>();

  constructor(
    readonly name: string,
    /** The tensors that the function accepts. All others are ignored. */
    readonly accepts: readonly AcceptedTensor[],
  ) {}

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
      const facts = { rows: BigInt(rows) };
      throw failure(status.FAILED_PRECONDITION, "ROWS_MISSING", message, { edge: this.name, tensor }, facts);
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
    this.#reached = new Map(Object.entries(firstRows).map(([tensor, rows]) => [tensor, Number(rows)]));
    this.#sent = new Map();
    this.changed.fire();
  }

  // -- the flow's packets

  accept(packet: Packet, flow: IncomingFlow): void {
    const sizeBytes = bytesOf(packet);
    const added = this.#hasEnded ? undefined : this.#withoutRepetition(this.#accepted(packet));
    if (added === undefined) flow.consume(sizeBytes);
    else this.#queue.push({ packet: added, sizeBytes, flow });
    this.changed.fire();
  }

  end(flow: IncomingFlow): void {
    if (this.#hasEnded) flow.commit();
    else if (this.#isRepeating) {
      flow.error = this.#attemptsDiffer("sent fewer rows than the previous one");
    } else this.#hasEnded = true;
    this.changed.fire();
  }

  /** Drops the tensors that the function does not accept. Throws INVALID_CHUNK if one that it needs is missing. */
  #accepted(packet: Packet): Packet {
    const tensors = this.accepts.flatMap(({ spec, optional }) => {
      const tensor = packet.tensors.find(({ name }) => name === spec?.name);
      if (tensor === undefined && !optional) throw invalidChunk(`a chunk lacks the tensor ${spec?.name}`);
      const fits = tensor === undefined || spec === undefined || hasType(tensor, spec);
      if (!fits) throw invalidChunk(`tensor ${tensor.name} has another type or shape than this stage accepts`);
      return tensor === undefined ? [] : [tensor];
    });
    return { ...packet, tensors };
  }

  /** Whether the present attempt has not yet sent all rows that have arrived. */
  get #isRepeating(): boolean {
    return [...this.#rows].some(([tensor, rows]) => (this.#reached.get(tensor) ?? 0) < rows);
  }

  /**
   * Drops the rows that an earlier producer has sent. Left context remains in front of the new rows. Returns undefined if
   * no row is left. Throws INVALID_CHUNK if the rows do not follow the rows before.
   */
  #withoutRepetition(packet: Packet): Packet | undefined {
    const { contextFrames, tokenStart } = packet;
    this.#hasContext ||= contextFrames !== undefined;
    const wasRepeating = this.#isRepeating;
    const context = contextFrames ?? 0;
    let [hasNew, hasRepeated] = [false, false];
    const skips = packet.tensors.map((tensor) => {
      const first = tensor.firstRow ?? 0;
      // The rows begin where the first packet says: its producer may have resumed from a checkpoint.
      const [begin, end] = [first + context, first + rowsOf(tensor)];
      const arrived = this.#rows.get(tensor.name) ?? begin;
      const next = this.#sent.get(tensor.name) ?? begin;
      if (begin > arrived || begin !== next || begin > end) {
        throw invalidChunk(`a chunk has the rows ${begin} to ${end} of ${tensor.name}, but row ${next} is next`);
      }
      this.#sent.set(tensor.name, end);
      this.#reached.set(tensor.name, end);
      this.#rows.set(tensor.name, Math.max(arrived, end));
      hasNew ||= end > arrived;
      hasRepeated ||= begin < arrived;
      return Math.max(0, Math.min(end, arrived) - begin);
    });
    if (!hasNew && (hasRepeated || wasRepeating)) return undefined;
    if (!hasRepeated) return packet;
    const tensors = packet.tensors
      .map((tensor, index) => ({ tensor, skip: skips[index] ?? 0 }))
      .filter(({ tensor, skip }) => tensor.shape.length > 0 || skip === 0)
      .map(({ tensor, skip }) => (skip > 0 ? sliceRows(tensor, skip, rowsOf(tensor)) : tensor));
    const moved = tokenStart === undefined ? undefined : tokenStart + BigInt(skips[0] ?? 0);
    return { ...packet, tensors, tokenStart: moved };
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

/** Returns whether a tensor has a type. A dimension is a number, or the name of one that may be any. */
function hasType({ dtype, shape }: NamedTensor, spec: TensorSpec): boolean {
  const isLike = (length: number, axis: number): boolean => {
    const wanted = spec.shape[axis] ?? "";
    return !/^\d+$/.test(wanted) || Number(wanted) === length;
  };
  return dtype === spec.dtype && shape.length === spec.shape.length && shape.every(isLike);
}
