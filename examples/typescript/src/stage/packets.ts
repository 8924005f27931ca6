import { status } from "@grpc/grpc-js";
import { failure, type StagemeshError } from "stagemesh/errors";
import type { ChunkData } from "stagemesh/v1/chunk";
import { DataType, type TypedValue } from "stagemesh/v1/tensor";

/** A dense array: little-endian and C-contiguous. */
export interface NamedTensor {
  readonly name: string;
  readonly dtype: DataType;
  readonly shape: readonly number[];
  readonly data: Uint8Array;
  /** The number of rows that precede it on its edge. A function need not set it. */
  readonly firstRow?: number;
}

/** The value of an option or of a packet's metadata. */
export type Value = NonNullable<TypedValue["kind"]>;

/** What a chunk says about its tensors. A function may omit these fields. */
export type PacketFields = Partial<
  Pick<ChunkData, "contextFrames" | "tokenStart" | "promptTokens" | "preview" | "engineSteps">
>;

/** Tensors that belong together: what a function receives and emits, and what a chunk carries. */
export interface Packet extends Readonly<PacketFields> {
  readonly tensors: readonly NamedTensor[];
  readonly metadata: Readonly<Record<string, Value>>;
}

const ELEMENT_BYTES: Readonly<Partial<Record<DataType, number>>> = {
  [DataType.BOOL]: 1,
  [DataType.UINT8]: 1,
  [DataType.INT8]: 1,
  [DataType.INT16]: 2,
  [DataType.INT32]: 4,
  [DataType.INT64]: 8,
  [DataType.FLOAT16]: 2,
  [DataType.BFLOAT16]: 2,
  [DataType.FLOAT32]: 4,
  [DataType.FLOAT64]: 8,
  [DataType.UINT16]: 2,
  [DataType.UINT32]: 4,
  [DataType.UINT64]: 8,
  [DataType.FLOAT8_E4M3]: 1,
  [DataType.FLOAT8_E5M2]: 1,
  [DataType.COMPLEX64]: 8,
  [DataType.COMPLEX128]: 16,
};

/** Returns the number of bytes of a tensor. Throws INVALID_CHUNK for an unknown type or an impossible shape. */
export function sizeOf(tensor: Pick<NamedTensor, "name" | "dtype" | "shape">): number {
  const size = tensor.shape.reduce((product, length) => product * length, ELEMENT_BYTES[tensor.dtype] ?? NaN);
  const isValid = Number.isSafeInteger(size) && tensor.shape.length <= 16 && tensor.shape.every((n) => n >= 0);
  if (isValid) return size;
  throw invalidChunk(`tensor ${tensor.name} has the type ${tensor.dtype} and the shape [${tensor.shape.join(", ")}]`);
}

export function invalidChunk(message: string): StagemeshError {
  return failure(status.INVALID_ARGUMENT, "INVALID_CHUNK", message);
}

export function bytesOf(packet: Packet): number {
  return packet.tensors.reduce((total, tensor) => total + tensor.data.length, 0);
}

/** Returns the number of rows along the first axis. A tensor without axes is one row. */
export function rowsOf(tensor: NamedTensor): number {
  return tensor.shape[0] ?? 1;
}

/** Returns the rows from `start` to before `end`. */
export function sliceRows(tensor: NamedTensor, start: number, end: number): NamedTensor {
  const rowBytes = tensor.data.length / Math.max(1, rowsOf(tensor));
  const data = tensor.data.subarray(start * rowBytes, end * rowBytes);
  const firstRow = (tensor.firstRow ?? 0) + start;
  return { ...tensor, shape: [end - start, ...tensor.shape.slice(1)], data, firstRow };
}

/** Concatenates tensors of the same name, type and further dimensions along their first axis. */
export function concatRows(tensors: readonly [NamedTensor, ...NamedTensor[]]): NamedTensor {
  const [first, ...others] = tensors;
  if (others.length === 0) return first;
  const rows = tensors.reduce((total, tensor) => total + rowsOf(tensor), 0);
  return { ...first, shape: [rows, ...first.shape.slice(1)], data: Buffer.concat(tensors.map(({ data }) => data)) };
}
