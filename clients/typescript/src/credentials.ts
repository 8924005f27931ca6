import { readFileSync } from "node:fs";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { type ChannelCredentials, credentials, Metadata } from "@grpc/grpc-js";

/** How a client identifies itself. Without `tls`, connections are plaintext. */
export interface Identity {
  /**
   * A folder with `ca.crt`, the certificates of the authorities of servers, and with the client's own certificate and key,
   * `tls.crt` and `tls.key`. A client with a token needs only `ca.crt`. All files are PEM. They are read once.
   */
  readonly tls?: string;
  /** A file with a token, which is read for each call. Needs `tls`. */
  readonly tokenFile?: string;
}

/** Returns the credentials of channels to orchestrators. Throws an error if a file is missing. */
export function channelCredentials({ tls, tokenFile }: Identity): ChannelCredentials {
  if (tls === undefined) {
    if (tokenFile !== undefined) throw new TypeError("a token needs TLS, because anyone on the network could read it");
    return credentials.createInsecure();
  }
  const authorities = readFileSync(join(tls, "ca.crt"));
  if (tokenFile === undefined) {
    return credentials.createSsl(
      authorities,
      readFileSync(join(tls, "tls.key")),
      readFileSync(join(tls, "tls.crt")),
    );
  }
  const token = credentials.createFromMetadataGenerator((_, callback) => {
    readFile(tokenFile, "ascii").then(
      (text) => {
        const metadata = new Metadata();
        metadata.set("authorization", `Bearer ${text.trim()}`);
        callback(null, metadata);
      },
      (error: Error) => callback(error),
    );
  });
  return credentials.combineChannelCredentials(credentials.createSsl(authorities), token);
}
