/**
 * A stage that converts text to upper case, for ASCII letters:
 *
 *     node dist/upper.js --pipeline demo --generation 3f1c… --stage upper --replica upper-0 --listen 127.0.0.1:50051
 *
 * With `--register HOST:PORT`, it registers at an orchestrator's port for operators and stages.
 */
import { parseArgs } from "node:util";
import { Signature, TensorKind } from "stagemesh/v1/signature";
import { DataType } from "stagemesh/v1/tensor";
import type { StageFunction, Task } from "./stage/function.js";
import type { Packet } from "./stage/packets.js";
import { Stage } from "./stage/stage.js";

const TEXT = { name: "text", dtype: DataType.UINT8, shape: ["bytes"] };

/** Converts each packet of text to upper case, and emits it `times` times. */
const upper: StageFunction = {
  signature: Signature.create({
    accepts: [{ spec: TEXT }],
    emits: [{ spec: TEXT, kind: TensorKind.TEXT }],
    options: [{ name: "times", defaultValue: { kind: { $case: "integer", value: 1n } }, minimum: 1, maximum: 1000 }],
  }),

  async *run(packets: AsyncIterable<Packet>, { options }: Task): AsyncGenerator<Packet> {
    const times = Number(options.get("times")?.value);
    for await (const { tensors, metadata } of packets) {
      const converted = tensors.map((tensor) => ({ ...tensor, data: tensor.data.map(toUpperCase) }));
      for (let time = 0; time < times; time++) yield { tensors: converted, metadata };
    }
  },
};

function toUpperCase(byte: number): number {
  const isLowerCase = byte >= 0x61 && byte <= 0x7a;
  return isLowerCase ? byte - 0x20 : byte;
}

const { values } = parseArgs({
  options: {
    pipeline: { type: "string", default: "" },
    generation: { type: "string", default: "" },
    stage: { type: "string", default: "upper" },
    replica: { type: "string", default: "upper-0" },
    listen: { type: "string", default: "127.0.0.1:0" },
    register: { type: "string", multiple: true, default: [] },
    "window-bytes": { type: "string", default: String(8 * 1024 * 1024) },
    "accepting-ms": { type: "string", default: "2000" },
    "welcome-ms": { type: "string", default: "5000" },
    "silence-ms": { type: "string", default: "2000" },
  },
});
const stage = new Stage(upper, {
  ...values,
  orchestrators: values.register,
  windowBytes: Number(values["window-bytes"]),
  acceptingMs: Number(values["accepting-ms"]),
  timeouts: { welcomeMs: Number(values["welcome-ms"]), silenceMs: Number(values["silence-ms"]) },
});
process.once("SIGTERM", () => void stage.stop());
console.log(`serving on port ${await stage.start()}`);
