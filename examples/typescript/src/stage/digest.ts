import { createHash } from "node:crypto";
import type { NamedTensor } from "./packets.js";

/** Digests the names, types and shapes of a flow's data chunks, as docs/protocol.md defines it. */
export class FlowDigest {
  readonly #hash = createHash("sha256");
  #run = Buffer.alloc(0);
  #runLength = 0n;
  /** The number of data chunks. */
  count = 0n;

  add(tensors: readonly Pick<NamedTensor, "name" | "dtype" | "shape">[]): void {
    const described = Buffer.concat([u32(tensors.length), ...tensors.map(describe)]);
    if (!described.equals(this.#run)) this.#endRun();
    this.#run = described;
    this.#runLength += 1n;
    this.count += 1n;
  }

  /** Returns the digest of the whole flow. Call it once, after the last chunk. */
  finish(): Uint8Array {
    this.#endRun();
    return this.#hash.digest();
  }

  #endRun(): void {
    if (this.#runLength > 0n) this.#hash.update(u64(this.#runLength)).update(this.#run);
    this.#runLength = 0n;
  }
}

function describe({ name, dtype, shape }: Pick<NamedTensor, "name" | "dtype" | "shape">): Buffer {
  const encoded = Buffer.from(name, "utf8");
  const dimensions = shape.map((length) => u64(BigInt(length)));
  return Buffer.concat([u32(encoded.length), encoded, u32(dtype), u32(shape.length), ...dimensions]);
}

function u32(value: number): Buffer {
  const bytes = Buffer.alloc(4);
  bytes.writeUInt32LE(value);
  return bytes;
}

function u64(value: bigint): Buffer {
  const bytes = Buffer.alloc(8);
  bytes.writeBigUInt64LE(value);
  return bytes;
}
