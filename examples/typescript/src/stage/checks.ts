import { status } from "@grpc/grpc-js";
import { failure, type StagemeshError } from "stagemesh/errors";
import { unknownKind, unknownKindError } from "stagemesh/protocol";
import { type ChunkData, Connector, type EdgeKey } from "stagemesh/v1/chunk";
import type { Signature } from "stagemesh/v1/signature";
import type { ExecuteStepRequest, InputBinding, OutputBinding } from "stagemesh/v1/stage";
import type { TypedValue } from "stagemesh/v1/tensor";
import { invalidChunk, type Value } from "./packets.js";

const MAX_TENSORS = 1024;
const MAX_VALUES = 64;
const MAX_NAME_CHARACTERS = 256;
const MAX_TEXT_CHARACTERS = 1024;
/** The metadata names that are fields of a chunk. */
const FIELDS = ["context_frames", "token_start", "prompt_tokens", "preview", "engine_steps"];

/** Throws StagemeshError if a step needs something that the function or this program does not support. */
export function checkStep(request: ExecuteStepRequest, signature: Signature): void {
  const { requestId, stepId, attempt, parameters, inputs, outputs, streamed } = request;
  if (requestId === "" || stepId === "" || attempt === 0) {
    throw invalidRequest("a step needs a request_id, a step_id and an attempt of at least 1");
  }
  const kind = parameters && unknownKind(parameters);
  if (kind !== undefined) throw unknownKindError("the orchestrator", "StageParameters", kind);
  if (parameters?.sampling) throw unsupported("sampling parameters");
  if (parameters?.adapter) throw unsupported("adapters");
  if (request.maxEngineSteps !== undefined || request.resumeFrom !== undefined) throw unsupported("pausing and resuming");
  if (inputs.length > 1) throw unsupported("several incoming edges");
  for (const { spec, optional } of signature.accepts) {
    if (spec === undefined || optional || (inputs.length > 0 && !request.absent.includes(spec.name))) continue;
    throw failure(status.INVALID_ARGUMENT, "MISSING_INPUT", `this stage needs the tensor ${spec.name}`);
  }
  for (const binding of [...inputs, ...outputs]) {
    checkBinding(binding);
    const { edge, transform } = binding;
    if (transform === "") continue;
    throw failure(status.NOT_FOUND, "UNKNOWN_TRANSFORM", `edge ${edge} needs the unknown transform ${transform}`);
  }
  if (hasDuplicates(outputs.map(({ edge }) => edge))) throw invalidEdge("an edge is bound twice");
  const names = streamed.map(({ tensor }) => tensor);
  for (const name of [...names, ...outputs.flatMap(({ tensors }) => tensors)]) {
    if (signature.emits.some(({ spec }) => spec?.name === name)) continue;
    throw failure(status.INVALID_ARGUMENT, "UNKNOWN_TENSOR", `this stage does not emit the tensor ${name}`);
  }
  if (hasDuplicates(names)) throw invalidRequest("an output is streamed twice");
  if (streamed.some(({ frameRate }) => frameRate !== undefined)) {
    throw invalidRequest("an output that is not a video has a frame rate");
  }
  if (streamed.some(({ mediaType, uri }) => mediaType !== "" || uri !== "")) throw unsupported("outputs as files");
}

/** Throws StagemeshError if an edge lacks its name, attempt or peer, or needs another connector than grpc. */
export function checkBinding(binding: InputBinding | OutputBinding): void {
  const { edge, attempt } = binding;
  const hasPeer = "producer" in binding ? binding.producer !== "" : binding.consumer !== "" && binding.endpoint !== "";
  if (edge === "" || attempt === 0 || !hasPeer) {
    throw invalidEdge(`edge ${edge} needs a name, an attempt of at least 1, and the replica at its other end`);
  }
  if (!("connector" in binding) || [Connector.AUTO, Connector.GRPC].includes(binding.connector)) return;
  const connector = Connector[binding.connector] ?? binding.connector;
  const message = `edge ${edge} needs the connector ${connector}, and this stage has grpc alone`;
  throw failure(status.FAILED_PRECONDITION, "CONNECTOR_UNAVAILABLE", message, { edge });
}

/** Throws MALFORMED_MESSAGE, which ends the stream, if a flow has too long a name. */
export function checkKey({ requestId, edge }: EdgeKey): void {
  if (lengthOf(requestId) <= MAX_NAME_CHARACTERS && lengthOf(edge) <= MAX_NAME_CHARACTERS) return;
  const message = `the key of an item has more than ${MAX_NAME_CHARACTERS} characters`;
  throw failure(status.INVALID_ARGUMENT, "MALFORMED_MESSAGE", message);
}

/** Throws INVALID_CHUNK if a chunk has too many tensors or values, or if a name or a value is not allowed. */
export function checkChunk({ tensors, metadata }: ChunkData): void {
  const names = tensors.map(({ name }) => name);
  const values = Object.entries(metadata);
  if (names.length > MAX_TENSORS) throw invalidChunk(`a chunk has more than ${MAX_TENSORS} tensors`);
  if (values.length > MAX_VALUES) throw invalidChunk(`a chunk has more than ${MAX_VALUES} metadata values`);
  if (hasDuplicates(names)) throw invalidChunk("two tensors of a chunk have the same name");
  if ([...names, ...Object.keys(metadata)].some((name) => lengthOf(name) > MAX_NAME_CHARACTERS)) {
    throw invalidChunk(`a name in a chunk has more than ${MAX_NAME_CHARACTERS} characters`);
  }
  for (const [name, { kind }] of values) {
    if (FIELDS.includes(name)) throw invalidChunk(`the metadata name ${name} is a field of the chunk`);
    if (kind === undefined) throw invalidChunk(`the metadata value ${name} has no kind`);
    const isTooLong = kind.$case === "text" && lengthOf(kind.value) > MAX_TEXT_CHARACTERS;
    if (isTooLong) throw invalidChunk(`the metadata value ${name} has more than ${MAX_TEXT_CHARACTERS} characters`);
  }
}

/** Returns the options of a step, with defaults. Throws UNKNOWN_OPTION and INVALID_OPTION. */
export function resolveOptions(given: Readonly<Record<string, TypedValue>>, signature: Signature): Map<string, Value> {
  const options = new Map<string, Value>();
  for (const { name, defaultValue: value } of signature.options) if (value?.kind) options.set(name, value.kind);
  for (const [name, { kind, ...rest }] of Object.entries(given)) {
    const spec = signature.options.find((option) => option.name === name);
    if (spec === undefined) {
      throw failure(status.INVALID_ARGUMENT, "UNKNOWN_OPTION", `this stage has no option ${name}`);
    }
    const laterKind = kind === undefined ? unknownKind(rest) : undefined;
    if (laterKind !== undefined) throw unknownKindError("the orchestrator", "TypedValue", laterKind);
    const value = kind?.$case === "integer" && spec.defaultValue?.kind?.$case === "number" ? toNumber(kind.value) : kind;
    const size = value?.$case === "text" ? lengthOf(value.value) : Number(value?.value);
    const isAllowed =
      value !== undefined &&
      value.$case === spec.defaultValue?.kind?.$case &&
      size >= (value.$case === "text" ? 0 : (spec.minimum ?? -Infinity)) &&
      size <= (spec.maximum ?? Infinity) &&
      (spec.allowedTexts.length === 0 || spec.allowedTexts.includes(String(value.value)));
    if (!isAllowed) {
      throw failure(status.INVALID_ARGUMENT, "INVALID_OPTION", `${name} cannot be ${String(kind?.value)}`);
    }
    options.set(name, value);
  }
  return options;
}

function toNumber(integer: bigint): Value {
  return { $case: "number", value: Number(integer) };
}

/** Returns the number of characters of a text. A character may have two UTF-16 units. */
function lengthOf(text: string): number {
  return [...text].length;
}

function hasDuplicates(names: readonly string[]): boolean {
  return new Set(names).size < names.length;
}

function invalidRequest(message: string): StagemeshError {
  return failure(status.INVALID_ARGUMENT, "INVALID_REQUEST", message);
}

export function invalidEdge(message: string): StagemeshError {
  return failure(status.INVALID_ARGUMENT, "INVALID_EDGE", message);
}

function unsupported(what: string): StagemeshError {
  return failure(status.UNIMPLEMENTED, "UNSUPPORTED", `this stage does not support ${what}`);
}
