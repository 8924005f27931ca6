import { Metadata, status, type ServiceError, type StatusObject } from "@grpc/grpc-js";
import { ErrorInfo, RetryInfo } from "./gen/google/rpc/error_details.js";
import { Status } from "./gen/google/rpc/status.js";
import { ErrorFacts, Error as WireError } from "./gen/stagemesh/v1/chunk.js";
import type { ErrorReason } from "./gen/stagemesh/v1/errors.js";

/** A reason of the error catalogue, docs/errors.md. */
export type Reason = keyof typeof ErrorReason;

const DOMAIN = "stagemesh";
const DETAILS_KEY = "grpc-status-details-bin";
/** The texts by which implementations of gRPC reject a message that is larger than the sender or the receiver allows. */
const TOO_LARGE = /message.* larger than max|size larger than|exceeds maximum size/i;
const TYPE_URL = "type.googleapis.com/";
/** gRPC limits the trailers of a call, often to 8 KiB. They contain the message twice. */
const MAX_MESSAGE_BYTES = 1024;
const MAX_METADATA_BYTES = 3072;

/** An error of Stagemesh. Decide by `code` and `reason`; the message is for people. */
export class StagemeshError extends Error {
  override readonly name = "StagemeshError";

  constructor(
    readonly code: status,
    /** A `Reason`, or a later one that this program does not know. */
    readonly reason: string,
    message: string,
    readonly metadata: Readonly<Record<string, string>> = {},
    readonly retryAfterS?: number,
    /** The numbers by which programs recover. */
    readonly facts: ErrorFacts = ErrorFacts.create(),
  ) {
    super(message);
  }

  /** Returns this error with more metadata. An entry that is set already has precedence: it names the first cause. */
  within(context: Readonly<Record<string, string>>): StagemeshError {
    return new StagemeshError(
      this.code,
      this.reason,
      this.message,
      { ...context, ...this.metadata },
      this.retryAfterS,
      this.facts,
    );
  }
}

/** Creates an error with a reason of the catalogue. */
export function failure(
  code: status,
  reason: Reason,
  message: string,
  metadata: Readonly<Record<string, string>> = {},
  facts: Partial<ErrorFacts> = {},
): StagemeshError {
  return new StagemeshError(code, reason, message, metadata, undefined, ErrorFacts.create(facts));
}

/** Returns any thrown value as a StagemeshError. One of another class is a defect of this program. */
export function toStagemeshError(thrown: unknown): StagemeshError {
  if (thrown instanceof StagemeshError) return thrown;
  const message = thrown instanceof Error ? (thrown.stack ?? thrown.message) : String(thrown);
  return failure(status.INTERNAL, "INTERNAL", message);
}

export function errorFromWire(error: WireError | undefined): StagemeshError {
  const { code, reason, message, metadata, retryAfterS, facts } = error ?? WireError.create();
  return new StagemeshError(code, reason, message, metadata, retryAfterS, facts);
}

export function errorToWire(error: StagemeshError): WireError {
  const { code, reason, message, metadata, retryAfterS } = error;
  const facts = hasFacts(error) ? error.facts : undefined;
  return WireError.create({ code, reason, message, metadata: { ...metadata }, retryAfterS, facts });
}

/**
 * Returns the status of a call that fails with this error, in the form that grpc-js expects from a server. The end of
 * a long message and the longest metadata are omitted.
 */
export function errorToStatus(error: StagemeshError): StatusObject {
  const info = ErrorInfo.create({ reason: error.reason, domain: DOMAIN, metadata: withoutLongest(error.metadata) });
  // Without the end of a long message, and without a part of a character.
  const message = new TextDecoder().decode(Buffer.from(error.message).subarray(0, MAX_MESSAGE_BYTES), { stream: true });
  const details = [{ typeUrl: `${TYPE_URL}google.rpc.ErrorInfo`, value: ErrorInfo.encode(info).finish() }];
  if (error.retryAfterS !== undefined) {
    const seconds = Math.floor(error.retryAfterS);
    const nanos = Math.round((error.retryAfterS - seconds) * 1e9);
    const retry = RetryInfo.create({ retryDelay: { seconds: BigInt(seconds), nanos } });
    details.push({ typeUrl: `${TYPE_URL}google.rpc.RetryInfo`, value: RetryInfo.encode(retry).finish() });
  }
  if (hasFacts(error)) {
    details.push({ typeUrl: `${TYPE_URL}stagemesh.v1.ErrorFacts`, value: ErrorFacts.encode(error.facts).finish() });
  }
  const metadata = new Metadata();
  const content = Status.create({ code: error.code, message, details });
  metadata.set(DETAILS_KEY, Buffer.from(Status.encode(content).finish()));
  return { code: error.code, details: message, metadata };
}

function withoutLongest(metadata: Readonly<Record<string, string>>): Record<string, string> {
  let leftBytes = MAX_METADATA_BYTES;
  const sizes = Object.entries(metadata).map((entry) => ({ entry, bytes: Buffer.byteLength(entry.join("")) }));
  sizes.sort((one, other) => one.bytes - other.bytes);
  return Object.fromEntries(sizes.filter(({ bytes }) => (leftBytes -= bytes) >= 0).map(({ entry }) => entry));
}

/**
 * Returns the error of a failed call. Its reason is empty if Stagemesh did not raise it, which means that the
 * connection or something on the way failed.
 */
export function errorFromStatus(error: ServiceError | StatusObject): StagemeshError {
  const [trailer] = error.metadata?.get(DETAILS_KEY) ?? [];
  let info = ErrorInfo.create();
  let retryAfterS: number | undefined;
  let facts: ErrorFacts | undefined;
  for (const { typeUrl, value } of Buffer.isBuffer(trailer) ? Status.decode(trailer).details : []) {
    if (typeUrl === `${TYPE_URL}google.rpc.ErrorInfo`) info = ErrorInfo.decode(value);
    if (typeUrl === `${TYPE_URL}stagemesh.v1.ErrorFacts`) facts = ErrorFacts.decode(value);
    if (typeUrl === `${TYPE_URL}google.rpc.RetryInfo`) {
      const delay = RetryInfo.decode(value).retryDelay;
      retryAfterS = Number(delay?.seconds ?? 0n) + (delay?.nanos ?? 0) / 1e9;
    }
  }
  const reason = info.domain === DOMAIN ? info.reason : "";
  if (reason === "" && error.code === status.RESOURCE_EXHAUSTED && TOO_LARGE.test(error.details)) {
    const message = `a message is too large (${error.details}); shorten the input, or request less`;
    return failure(status.INVALID_ARGUMENT, "MESSAGE_TOO_LARGE", message);
  }
  return new StagemeshError(error.code, reason, error.details, info.metadata, retryAfterS, facts);
}

function hasFacts({ facts }: StagemeshError): boolean {
  return facts.attempt !== undefined || facts.rows !== undefined;
}

/** Returns whether a thrown value is the status of a failed call. */
export function isServiceError(thrown: unknown): thrown is ServiceError {
  return thrown instanceof Error && "code" in thrown && "metadata" in thrown && !(thrown instanceof StagemeshError);
}
