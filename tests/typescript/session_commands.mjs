// Holds a session as a test asks for it: node session_commands.mjs HOST:PORT[,HOST:PORT…] SESSION-AS-JSON
//
// Each line of standard input is a command as JSON: the name of a method of Session, then its arguments. The program
// prints every event that it reads and the outcome of every command as a line of JSON.
import { createInterface } from "node:readline";
import { audioPart, StagemeshClient } from "stagemesh";

const [endpoints, input] = process.argv.slice(2);
const client = new StagemeshClient(endpoints.split(","));

function print(line) {
  const text = JSON.stringify(line, function (key, value) {
    if (this[key] instanceof Uint8Array) return Buffer.from(this[key]).toString("base64");
    return typeof value === "bigint" ? Number(value) : value;
  });
  console.log(text);
}

async function attempt(command) {
  try {
    print({ result: (await command()) ?? null });
  } catch ({ code, reason, message, metadata }) {
    print({ error: { code, reason, message, metadata } });
  }
}

let session;
await attempt(async () => {
  session = await client.converse(JSON.parse(input, (key, value) => (key === "seed" ? BigInt(value) : value)));
  return session.opened;
});

const commands = {
  // Appends float32 samples in base64.
  audio(samples, sampleRateHz) {
    return session.append(audioPart(new Float32Array(new Uint8Array(Buffer.from(samples, "base64")).buffer), sampleRateHz));
  },
  async answer() {
    for await (const event of session.answer()) print({ event });
  },
  // Reads events up to the given number of events of a kind. The kind of an output is that of its content.
  async read($case, count = 1) {
    for await (const event of session) {
      print({ event });
      const kind = event.$case === "output" ? event.value.content?.$case : event.$case;
      if (kind === $case && --count === 0) return;
    }
  },
};

for await (const line of createInterface(process.stdin)) {
  const [name, ...rest] = JSON.parse(line);
  await attempt(() => (commands[name] ?? session[name].bind(session))(...rest));
}
client.close();
