import { type DeepPartial, InputAppend } from "../gen/stagemesh/v1/orchestrator.js";
import { type Audio, Message, Part, Role } from "../gen/stagemesh/v1/request.js";
import { DataType } from "../gen/stagemesh/v1/tensor.js";

/** Input of a turn: a text of the user, a part of the user's message, or a message of any role. */
export type Content = string | DeepPartial<Part> | (DeepPartial<Message> & { role: Role });

const PIECE_BYTES = 256 * 1024;
const PIECE_CHARACTERS = PIECE_BYTES / 4;

/** Returns a part with audio samples: one channel, between -1 and 1. */
export function audioPart(samples: Float32Array, sampleRateHz: number): Part {
  const data = Buffer.from(samples.buffer, samples.byteOffset, samples.byteLength);
  return Part.create({
    content: {
      $case: "audio",
      value: {
        samples: {
          name: "samples",
          dtype: DataType.FLOAT32,
          shape: [BigInt(samples.length)],
          location: { $case: "inline", value: data },
        },
        sampleRateHz,
      },
    },
  });
}

/** Yields the pieces of content. Divides long text and audio, which then do not need all of their credit at once. */
export function* piecesOf(content: Content): Generator<InputAppend> {
  if (typeof content === "string") {
    const characters = [...content];
    for (let begin = 0; begin === 0 || begin < characters.length; begin += PIECE_CHARACTERS) {
      yield textPiece(characters.slice(begin, begin + PIECE_CHARACTERS).join(""));
    }
  } else if ("role" in content) {
    yield InputAppend.create({ piece: { $case: "message", value: content } });
  } else {
    const piece = InputAppend.create({ piece: { $case: "part", value: content } });
    const audio = audioOf(piece);
    const rows = rowsOf(audio);
    const rowsAtOnce = Math.max(1, Math.floor(PIECE_BYTES / rowBytes(audio)));
    if (audio === undefined || rows <= rowsAtOnce) yield piece;
    else for (let begin = 0; begin < rows; begin += rowsAtOnce) yield rowsPiece(audio, begin, begin + rowsAtOnce);
  }
}

/** Returns the number of bytes for which a piece counts: those of its text, its samples, its file or its message. */
export function sizeOf({ piece }: InputAppend): number {
  if (piece?.$case === "message") return Message.encode(piece.value).finish().length;
  const content = piece?.value.content;
  if (content === undefined) return 0;
  switch (content.$case) {
    case "text":
      return Buffer.byteLength(content.value);
    case "audio":
      return inlineOf(content.value).length;
    default:
      return content.value.content?.$case === "data" ? content.value.content.value.length : 0;
  }
}

/** Returns the duration of audio samples in seconds, and 0 for any other piece. */
export function durationOf(piece: InputAppend): number {
  const audio = audioOf(piece);
  return audio?.sampleRateHz ? rowsOf(audio) / audio.sampleRateHz : 0;
}

/** Divides a piece of audio samples at a time since its begin, in seconds. */
export function divide(piece: InputAppend, atS: number): [InputAppend, InputAppend] {
  const audio = audioOf(piece)!;
  const middle = Math.round(atS * audio.sampleRateHz);
  return [rowsPiece(audio, 0, middle), rowsPiece(audio, middle, rowsOf(audio))];
}

/**
 * Returns the messages that pieces form. Consecutive parts form one message of the user. Consecutive texts are joined, and
 * so are audio samples with the same rate and number of channels.
 */
export function messagesOf(pieces: Iterable<InputAppend>): Message[] {
  const messages: Message[] = [];
  let parts: Part[] = [];
  const endUserMessage = () => {
    if (parts.length > 0) messages.push(userMessage(parts));
    parts = [];
  };
  for (const { piece } of pieces) {
    if (piece?.$case === "message") {
      endUserMessage();
      messages.push(piece.value);
    } else if (piece !== undefined) {
      const joined = join(parts.at(-1), piece.value);
      if (joined === undefined) parts.push(piece.value);
      else parts[parts.length - 1] = joined;
    }
  }
  endUserMessage();
  return messages;
}

function userMessage(parts: Part[]): Message {
  const [first, ...others] = parts;
  if (first?.content?.$case === "text" && others.length === 0) {
    return Message.create({ role: Role.USER, content: first.content.value });
  }
  return Message.create({ role: Role.USER, parts });
}

/** Returns two parts as one, or undefined if they cannot be joined. */
function join(former: Part | undefined, latter: Part): Part | undefined {
  const [a, b] = [former?.content, latter.content];
  if (a?.$case === "text" && b?.$case === "text") {
    return Part.create({ content: { $case: "text", value: a.value + b.value } });
  }
  if (a?.$case !== "audio" || b?.$case !== "audio" || formatOf(a.value) !== formatOf(b.value)) return undefined;
  const [rows, ...row] = a.value.samples?.shape ?? [];
  const samples = {
    ...a.value.samples,
    shape: [(rows ?? 0n) + BigInt(rowsOf(b.value)), ...row],
    location: { $case: "inline" as const, value: Buffer.concat([inlineOf(a.value), inlineOf(b.value)]) },
  };
  return Part.create({ content: { $case: "audio", value: { ...a.value, samples } } });
}

function formatOf({ sampleRateHz, samples }: Audio): string {
  return `${sampleRateHz} ${samples?.dtype} ${samples?.shape.slice(1)}`;
}

function textPiece(text: string): InputAppend {
  return InputAppend.create({ piece: { $case: "part", value: { content: { $case: "text", value: text } } } });
}

function rowsPiece(audio: Audio, begin: number, end: number): InputAppend {
  const bytes = rowBytes(audio);
  const data = inlineOf(audio).subarray(begin * bytes, end * bytes);
  const [, ...row] = audio.samples?.shape ?? [];
  const samples = {
    ...audio.samples,
    shape: [BigInt(Math.min(end, rowsOf(audio)) - begin), ...row],
    location: { $case: "inline" as const, value: data },
  };
  const content = { $case: "audio" as const, value: { samples, sampleRateHz: audio.sampleRateHz } };
  return InputAppend.create({ piece: { $case: "part", value: { content } } });
}

function audioOf({ piece }: InputAppend): Audio | undefined {
  const content = piece?.$case === "part" ? piece.value.content : undefined;
  return content?.$case === "audio" ? content.value : undefined;
}

function rowsOf(audio: Audio | undefined): number {
  return Number(audio?.samples?.shape[0] ?? 0n);
}

function rowBytes(audio: Audio | undefined): number {
  const rows = rowsOf(audio);
  return audio === undefined || rows === 0 ? 1 : inlineOf(audio).length / rows;
}

function inlineOf({ samples }: Audio): Uint8Array {
  return samples?.location?.$case === "inline" ? samples.location.value : new Uint8Array();
}
