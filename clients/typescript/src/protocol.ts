import { createRequire } from "node:module";
import { type ChannelOptions, status } from "@grpc/grpc-js";
import { failure, type StagemeshError } from "./errors.js";
import { Protocol } from "./gen/stagemesh/v1/protocol.js";

/** The largest message in each direction. */
export const MESSAGE_BYTES = 8 * 1024 * 1024;

/** The options of every client and server. */
export const CHANNEL_OPTIONS: ChannelOptions = {
  "grpc.max_receive_message_length": MESSAGE_BYTES,
  "grpc.max_send_message_length": MESSAGE_BYTES,
  // Without pings, a client does not notice that a host is unreachable.
  "grpc.keepalive_time_ms": 2000,
  "grpc.keepalive_timeout_ms": 2000,
  "grpc.keepalive_permit_without_calls": 1,
  // The defaults wait up to two minutes before they connect again.
  "grpc.initial_reconnect_backoff_ms": 100,
  "grpc.max_reconnect_backoff_ms": 1000,
  // Retries of gRPC's own keep every message of a stream in memory. Stagemesh's protocol retries by itself.
  "grpc.enable_retries": 0,
  "grpc.enable_http_proxy": 0,
};

const { version: VERSION } = createRequire(import.meta.url)("../package.json") as { version: string };

/** What this program speaks. */
export const PROTOCOL = Protocol.create({
  lowestVersion: 1,
  highestVersion: 1,
  software: `stagemesh-typescript ${VERSION}`,
});

/** Throws NO_COMMON_VERSION unless a peer speaks a version that this program speaks. */
export function checkProtocol(peer: string, protocol: Protocol | undefined): void {
  const { lowestVersion: low, highestVersion: high } = protocol ?? Protocol.create();
  if (low <= PROTOCOL.highestVersion && high >= PROTOCOL.lowestVersion) return;
  const theirs = protocol ? `versions ${low} to ${high}` : "no version";
  const older = high < PROTOCOL.lowestVersion ? peer : "this program";
  throw failure(
    status.FAILED_PRECONDITION,
    "NO_COMMON_VERSION",
    `${peer} speaks ${theirs} of the protocol, and this program speaks versions ` +
      `${PROTOCOL.lowestVersion} to ${PROTOCOL.highestVersion}: upgrade ${older}`,
  );
}

/** The unknown fields of a generated message: the encoded values by tag, where a tag is `number << 3 | wireType`. */
interface WithUnknownFields {
  _unknownFields?: { [tag: number]: Uint8Array[] } | undefined;
}

/**
 * Returns the number of an unknown field of a message without a known kind, or undefined if it has none.
 * A later version of the sender's software has added that kind.
 */
export function unknownKind(message: WithUnknownFields): number | undefined {
  const [tag] = Object.keys(message._unknownFields ?? {});
  return tag === undefined ? undefined : Number(tag) >>> 3;
}

/** Returns the error for a message of an unknown kind. */
export function unknownKindError(sender: string, message: string, kind: number): StagemeshError {
  const text = `${sender} sent a ${message} of an unknown kind (field ${kind}): upgrade this program`;
  return failure(status.UNIMPLEMENTED, "UNKNOWN_KIND", text, { message, field: String(kind) });
}

/** Throws MESSAGE_TOO_LARGE if a message of this size cannot be sent. `what` names the message in the error. */
export function checkSize(sizeBytes: number, what: string): void {
  // The message that contains it has a few bytes more.
  const limit = MESSAGE_BYTES - 1024;
  if (sizeBytes <= limit) return;
  const text = `the ${what} is ${sizeBytes} bytes long; the limit is ${limit}; shorten the input, or upload its media`;
  const metadata = { size_bytes: String(sizeBytes), limit_bytes: String(limit) };
  throw failure(status.INVALID_ARGUMENT, "MESSAGE_TOO_LARGE", text, metadata);
}
