import { status } from "@grpc/grpc-js";
import { failure } from "stagemesh/errors";
import { Finish, FinishReason, Output } from "stagemesh/v1/request";
import { type EmittedTensor, TensorKind } from "stagemesh/v1/signature";
import { Tensor } from "stagemesh/v1/tensor";
import { MESSAGE_BYTES } from "stagemesh/protocol";
import { type NamedTensor, rowsOf } from "./packets.js";

/** Turns the rows of an emitted tensor into the parts of an output for the client. */
export class OutputStream {
  #position = 0n;
  /** Holds back the bytes of an incomplete character. */
  readonly #decoder = new TextDecoder("utf-8", { ignoreBOM: true });

  constructor(readonly emitted: EmittedTensor) {}

  /** Returns the part for more rows, or undefined if there is nothing to send yet. */
  add(tensor: NamedTensor): Output | undefined {
    if (tensor.data.length > MESSAGE_BYTES / 2) {
      const message = `a part of ${tensor.name} has ${tensor.data.length} bytes`;
      throw failure(status.INVALID_ARGUMENT, "OUTPUT_TOO_LARGE", message);
    }
    switch (this.emitted.kind) {
      case TensorKind.TEXT:
        return this.#text(this.#decoder.decode(tensor.data, { stream: true }));
      case TensorKind.AUDIO: {
        const { sampleRateHz } = this.emitted;
        return this.#part(rowsOf(tensor), { $case: "audio", value: { samples: inline(tensor), sampleRateHz } });
      }
      default:
        return this.#part(rowsOf(tensor), { $case: "tensor", value: inline(tensor) });
    }
  }

  /** Returns the last part. */
  finish(): Output {
    const rest = this.emitted.kind === TensorKind.TEXT ? this.#text(this.#decoder.decode()) : undefined;
    const last = rest ?? Output.create({ name: this.#name, position: this.#position });
    last.finish = Finish.create({ reason: FinishReason.END });
    return last;
  }

  get #name(): string {
    return this.emitted.spec?.name ?? "";
  }

  #text(text: string): Output | undefined {
    return text === "" ? undefined : this.#part(Buffer.byteLength(text), { $case: "text", value: text });
  }

  #part(length: number, content: Output["content"]): Output {
    const part = Output.create({ name: this.#name, position: this.#position });
    part.content = content;
    this.#position += BigInt(length);
    return part;
  }
}

function inline({ name, dtype, shape, data }: NamedTensor): Tensor {
  return Tensor.create({ name, dtype, shape: shape.map(BigInt), location: { $case: "inline", value: data } });
}
