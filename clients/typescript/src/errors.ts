import { Metadata, status, type ServiceError, type StatusObject } from "@grpc/grpc-js";
import { ErrorInfo, RetryInfo, Status } from "./gen/google/rpc/status.js";
import { Error as WireError } from "./gen/stagemesh/v1/chunk.js";
import type { ErrorReason } from "./gen/stagemesh/v1/errors.js";

/** A reason of the error catalogue, docs/errors.md. */
export type Reason = keyof typeof ErrorReason;

const DOMAIN = "stagemesh";
const DETAILS_KEY = "grpc-status-details-bin";
const TYPE_URL = "type.googleapis.com/";

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
    );
  }
}

/** Creates an error with a reason of the catalogue. */
export function failure(
  code: status,
  reason: Reason,
  message: string,
  metadata: Readonly<Record<string, string>> = {},
): StagemeshError {
  return new StagemeshError(code, reason, message, metadata);
}

/** Returns any thrown value as a StagemeshError. One of another class is a defect of this program. */
export function toStagemeshError(thrown: unknown): StagemeshError {
  if (thrown instanceof StagemeshError) return thrown;
  const message = thrown instanceof Error ? (thrown.stack ?? thrown.message) : String(thrown);
  return failure(status.INTERNAL, "INTERNAL", message);
}

export function errorFromWire(error: WireError | undefined): StagemeshError {
  const { code, reason, message, metadata, retryAfterS } = error ?? WireError.create();
  return new StagemeshError(code, reason, message, metadata, retryAfterS);
}

export function errorToWire(error: StagemeshError): WireError {
  const { code, reason, message, metadata, retryAfterS } = error;
  return WireError.create({ code, reason, message, metadata: { ...metadata }, retryAfterS });
}

/** Returns the status of a call that fails with this error, in the form that grpc-js expects from a server. */
export function errorToStatus(error: StagemeshError): StatusObject {
  const info = ErrorInfo.create({ reason: error.reason, domain: DOMAIN, metadata: { ...error.metadata } });
  const details = [{ typeUrl: `${TYPE_URL}google.rpc.ErrorInfo`, value: ErrorInfo.encode(info).finish() }];
  if (error.retryAfterS !== undefined) {
    const seconds = Math.floor(error.retryAfterS);
    const nanos = Math.round((error.retryAfterS - seconds) * 1e9);
    const retry = RetryInfo.create({ retryDelay: { seconds: BigInt(seconds), nanos } });
    details.push({ typeUrl: `${TYPE_URL}google.rpc.RetryInfo`, value: RetryInfo.encode(retry).finish() });
  }
  const metadata = new Metadata();
  const content = Status.create({ code: error.code, message: error.message, details });
  metadata.set(DETAILS_KEY, Buffer.from(Status.encode(content).finish()));
  return { code: error.code, details: error.message, metadata };
}

/**
 * Returns the error of a failed call. Its reason is empty if Stagemesh did not raise it, which means that the
 * connection or something on the way failed.
 */
export function errorFromStatus(error: ServiceError | StatusObject): StagemeshError {
  const [trailer] = error.metadata?.get(DETAILS_KEY) ?? [];
  let info = ErrorInfo.create();
  let retryAfterS: number | undefined;
  for (const { typeUrl, value } of Buffer.isBuffer(trailer) ? Status.decode(trailer).details : []) {
    if (typeUrl === `${TYPE_URL}google.rpc.ErrorInfo`) info = ErrorInfo.decode(value);
    if (typeUrl === `${TYPE_URL}google.rpc.RetryInfo`) {
      const delay = RetryInfo.decode(value).retryDelay;
      retryAfterS = Number(delay?.seconds ?? 0n) + (delay?.nanos ?? 0) / 1e9;
    }
  }
  const reason = info.domain === DOMAIN ? info.reason : "";
  return new StagemeshError(error.code, reason, error.details, info.metadata, retryAfterS);
}

/** Returns whether a thrown value is the status of a failed call. */
export function isServiceError(thrown: unknown): thrown is ServiceError {
  return thrown instanceof Error && "code" in thrown && "metadata" in thrown && !(thrown instanceof StagemeshError);
}
