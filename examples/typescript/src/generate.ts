/**
 * Runs one request and prints its text:
 *
 *     node dist/generate.js 127.0.0.1:7780 "Tell me about the sea."
 *
 * Several addresses are separated by commas. With `--json`, prints every event as a line of JSON. `--tls` names a folder
 * with certificates, and `--token-file` a file with a token.
 */
import { parseArgs } from "node:util";
import { FinishReason, type GenerateEvent, StagemeshClient, StagemeshError } from "stagemesh";

const USAGE =
  "usage: node dist/generate.js [--seed N] [--choices N] [--request-id ID] [--json] [--tls FOLDER] [--token-file FILE] " +
  "HOST:PORT[,HOST:PORT…] PROMPT";

async function main(): Promise<void> {
  const { positionals, values } = parseArgs({
    allowPositionals: true,
    options: {
      choices: { type: "string" },
      json: { type: "boolean" },
      "request-id": { type: "string" },
      seed: { type: "string" },
      tls: { type: "string" },
      "token-file": { type: "string" },
    },
  });
  const [endpoints, prompt] = positionals;
  if (endpoints === undefined || prompt === undefined) throw new TypeError(USAGE);
  const client = new StagemeshClient(endpoints.split(","), {
    ...(values.tls === undefined ? {} : { tls: values.tls }),
    ...(values["token-file"] === undefined ? {} : { tokenFile: values["token-file"] }),
  });
  const stop = new AbortController();
  process.once("SIGINT", () => stop.abort());
  try {
    const request = {
      requestId: values["request-id"] ?? "",
      input: { prompt: { $case: "text" as const, value: prompt } },
      parameters: {
        ...(values.seed === undefined ? {} : { seed: BigInt(values.seed) }),
        ...(values.choices === undefined ? {} : { choices: Number(values.choices) }),
      },
    };
    for await (const event of client.generate(request, { signal: stop.signal })) {
      if (values.json) console.log(toJson(event));
      else print(event);
    }
  } finally {
    client.close();
  }
}

function print(event: GenerateEvent): void {
  if (event.$case === "output") {
    const { name, content, finish } = event.value;
    if (content?.$case === "text") process.stdout.write(content.value);
    if (finish) console.error(`\n${name} ends: ${FinishReason[finish.reason]}`);
  } else if (event.$case === "finished") {
    for (const { stages } of event.value.choices) {
      for (const [stage, { usage }] of Object.entries(stages)) {
        console.error(`${stage}: ${usage?.promptTokens} prompt tokens, ${usage?.outputTokens} output tokens`);
      }
    }
  }
}

/** Returns an event as JSON, with 64-bit numbers as strings and bytes in base64, as in the JSON format of protobuf. */
function toJson(event: GenerateEvent): string {
  return JSON.stringify(event, function (this: Record<string, unknown>, key, value: unknown) {
    const original = this[key]; // `value` is what toJSON of a Buffer returns
    if (original instanceof Uint8Array) return Buffer.from(original).toString("base64");
    if (key === "_unknownFields") return undefined;
    return typeof value === "bigint" ? value.toString() : value;
  });
}

main().catch((thrown: unknown) => {
  if (thrown instanceof StagemeshError) console.error(`${thrown.reason}: ${thrown.message}`);
  else console.error(thrown instanceof Error ? thrown.message : thrown);
  process.exitCode = 1;
});
