import { status } from "@grpc/grpc-js";
import { failure } from "stagemesh/errors";
import { Connector } from "stagemesh/v1/chunk";
import type { Signature } from "stagemesh/v1/signature";
import type { ExecuteStepRequest, OutputBinding } from "stagemesh/v1/stage";
import type { TypedValue } from "stagemesh/v1/tensor";
import type { Value } from "./packets.js";

/** Throws StagemeshError if a step needs something that the function or this program does not support. */
export function checkStep(request: ExecuteStepRequest, signature: Signature): void {
  const unsupported = (what: string): never => {
    throw failure(status.UNIMPLEMENTED, "UNSUPPORTED", `this stage does not support ${what}`);
  };
  if (request.parameters?.sampling) unsupported("sampling parameters");
  if (request.parameters?.adapter) unsupported("adapters");
  if (request.maxSteps !== undefined || request.resumeFrom !== undefined) unsupported("pausing and resuming");
  if (request.inputs.length > 1) unsupported("several incoming edges");
  for (const { spec, optional } of signature.accepts) {
    if (spec === undefined || optional || !request.absent.includes(spec.name)) continue;
    throw failure(status.INVALID_ARGUMENT, "MISSING_INPUT", `this stage needs the tensor ${spec.name}`);
  }
  for (const { edge, transform } of request.inputs) {
    if (!transform) continue;
    throw failure(status.NOT_FOUND, "UNKNOWN_TRANSFORM", `edge ${edge} needs the unknown transform ${transform}`);
  }
  for (const binding of request.outputs) {
    checkOutput(binding);
    checkEmitted(binding.tensors, signature);
  }
  checkEmitted(
    request.streamed.map(({ tensor }) => tensor),
    signature,
  );
  if (request.streamed.some(({ mediaType, uri }) => mediaType !== "" || uri !== "")) unsupported("outputs as files");
}

/** Throws CONNECTOR_UNAVAILABLE if an edge is not sent by the connector grpc. */
export function checkOutput({ edge, connector }: OutputBinding): void {
  if ([Connector.UNSPECIFIED, Connector.AUTO, Connector.GRPC].includes(connector)) return;
  const message = `edge ${edge} needs the connector ${Connector[connector] ?? connector}, and this stage has grpc alone`;
  throw failure(status.FAILED_PRECONDITION, "CONNECTOR_UNAVAILABLE", message, { edge });
}

/** Returns the options of a step, with defaults. Throws UNKNOWN_OPTION and INVALID_OPTION. */
export function resolveOptions(given: Readonly<Record<string, TypedValue>>, signature: Signature): Map<string, Value> {
  const options = new Map<string, Value>();
  for (const { name, defaultValue: value } of signature.options) if (value?.kind) options.set(name, value.kind);
  for (const [name, { kind }] of Object.entries(given)) {
    const spec = signature.options.find((option) => option.name === name);
    if (spec === undefined) {
      throw failure(status.INVALID_ARGUMENT, "UNKNOWN_OPTION", `this stage has no option ${name}`);
    }
    const value = kind?.$case === "integer" && spec.defaultValue?.kind?.$case === "number" ? toNumber(kind.value) : kind;
    const size = value?.$case === "text" ? [...value.value].length : Number(value?.value);
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

function checkEmitted(names: readonly string[], signature: Signature): void {
  const unknown = names.find((name) => signature.emits.every(({ spec }) => spec?.name !== name));
  if (unknown === undefined) return;
  throw failure(status.INVALID_ARGUMENT, "UNKNOWN_TENSOR", `this stage does not emit the tensor ${unknown}`);
}
