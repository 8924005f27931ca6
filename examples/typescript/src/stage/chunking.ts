import { status } from "@grpc/grpc-js";
import { failure } from "stagemesh/errors";
import type { ChunkPolicy, FramesPolicy } from "stagemesh/v1/stage";
import { unknownKind, unknownKindError } from "stagemesh/protocol";
import { concatRows, invalidChunk, type NamedTensor, type Packet, rowsOf, sliceRows } from "./packets.js";

/** Divides the packets that a function emits into the chunks of a flow. */
export interface Chunker {
  /** Returns the chunks that are complete with this packet. */
  add(packet: Packet): Packet[];
  /** Returns the rest, after the last packet. */
  finish(): Packet[];
}

/** Creates the chunker of a policy. Throws UNKNOWN_KIND for a policy that this program does not know. */
export function createChunker(policy: ChunkPolicy | undefined): Chunker {
  switch (policy?.cut?.$case) {
    case undefined: {
      const kind = policy && unknownKind(policy);
      if (kind !== undefined) throw unknownKindError("the orchestrator", "ChunkPolicy", kind);
      const rows = new RowCounter();
      return { add: (packet) => [rows.number(packet)], finish: () => [] };
    }
    case "whole":
      return new FramesChunker({ frames: Infinity, leftContextFrames: 0, ramp: [], pace: undefined });
    case "frames":
      if (Math.min(policy.cut.value.frames, ...policy.cut.value.ramp) < 1) {
        throw failure(status.INVALID_ARGUMENT, "INVALID_REQUEST", "a chunk policy needs at least 1 frame in each chunk");
      }
      return new FramesChunker(policy.cut.value);
  }
}

/** Numbers the rows of each tensor, over all packets. */
class RowCounter {
  readonly #rows = new Map<string, number>();

  /** Returns a packet with the number of each tensor's first row. */
  number(packet: Packet): Packet {
    const tensors = packet.tensors.map((tensor) => {
      const firstRow = this.#rows.get(tensor.name) ?? 0;
      this.#rows.set(tensor.name, firstRow + rowsOf(tensor));
      return { ...tensor, firstRow };
    });
    return { ...packet, tensors };
  }
}

class FramesChunker implements Chunker {
  #waiting: Packet[] = [];
  #wanted: number;
  readonly #ramp: Iterator<number>;
  #context: readonly NamedTensor[] = [];
  readonly #rows = new RowCounter();

  constructor(readonly policy: FramesPolicy) {
    this.#ramp = policy.ramp.values();
    this.#wanted = this.#next();
  }

  add(packet: Packet): Packet[] {
    framesOf(packet);
    this.#waiting.push(packet);
    const chunks: Packet[] = [];
    while (this.#waitingFrames >= this.#wanted) {
      const joined = join(this.#waiting);
      chunks.push(this.#complete(slice(joined, 0, this.#wanted)));
      this.#waiting = framesOf(joined) > this.#wanted ? [slice(joined, this.#wanted)] : [];
      this.#wanted = this.#next();
    }
    return chunks;
  }

  finish(): Packet[] {
    if (this.#waitingFrames === 0) return [];
    const chunk = this.#complete(join(this.#waiting));
    this.#waiting = [];
    return [chunk];
  }

  #next(): number {
    const next = this.#ramp.next();
    return next.done ? this.policy.frames : next.value;
  }

  get #waitingFrames(): number {
    return this.#waiting.reduce((total, packet) => total + framesOf(packet), 0);
  }

  /** Numbers the rows of a chunk, and repeats the last frames of the previous chunk at its start. */
  #complete(uncounted: Packet): Packet {
    const chunk = this.#rows.number(uncounted);
    const { leftContextFrames } = this.policy;
    if (leftContextFrames === 0) return chunk;
    const context = this.#context;
    const frames = context[0] ? rowsOf(context[0]) : 0;
    const tensors = chunk.tensors.map((tensor, index) => {
      const before = context[index];
      return before ? concatRows([before, tensor]) : tensor;
    });
    this.#context = tensors.map((tensor) => {
      const rows = rowsOf(tensor);
      return sliceRows(tensor, Math.max(0, rows - leftContextFrames), rows);
    });
    return { ...chunk, tensors, contextFrames: frames };
  }
}

/** Returns the number of frames of a packet. Throws INVALID_CHUNK unless it is the same for all of its tensors. */
function framesOf({ tensors }: Packet): number {
  const [first] = tensors;
  if (first === undefined || tensors.some(({ shape }) => shape[0] === undefined || shape[0] !== first.shape[0])) {
    throw invalidChunk("tensors that are cut along their first axis must have equal lengths");
  }
  return rowsOf(first);
}

function slice(packet: Packet, start: number, end?: number): Packet {
  const tensors = packet.tensors.map((tensor) => sliceRows(tensor, start, end ?? rowsOf(tensor)));
  const { tokenStart } = packet;
  return tokenStart === undefined ? { ...packet, tensors } : { ...packet, tensors, tokenStart: tokenStart + BigInt(start) };
}

/**
 * Joins packets with the same tensors. Of metadata with the same name, the last packet's value is used. The rows keep the
 * position of the first packet.
 */
function join(packets: readonly Packet[]): Packet {
  const [first, ...others] = packets;
  if (first === undefined) throw new RangeError("there is nothing to join");
  const tensors = first.tensors.map((tensor, index) =>
    concatRows([
      tensor,
      ...others.map((packet) => {
        const other = packet.tensors[index];
        if (other?.name !== tensor.name || packet.tensors.length !== first.tensors.length) {
          throw invalidChunk("packets that are joined into one chunk must have the same tensors");
        }
        return other;
      }),
    ]),
  );
  const metadata = Object.assign({}, ...packets.map((packet) => packet.metadata)) as Packet["metadata"];
  return { ...first, tensors, metadata };
}
