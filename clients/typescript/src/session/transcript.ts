import { status } from "@grpc/grpc-js";
import { failure } from "../errors.js";
import { ConverseRequest, type InputAppend, type OutputPosition, TurnRestore } from "../gen/stagemesh/v1/orchestrator.js";
import { Message, Role } from "../gen/stagemesh/v1/request.js";
import { messagesOf } from "./pieces.js";

/** The turns of a session that have ended, from which another orchestrator can continue it. */
export class Transcript {
  readonly #turns: TurnRestore[] = [];

  /** `hasPrompts` is whether pieces become messages. Streamed input does not. */
  constructor(readonly hasPrompts: boolean) {}

  /** The answer to the newest turn. Empty if no turn has ended. */
  get answer(): string {
    return this.#turns.at(-1)?.messages.at(-1)?.content ?? "";
  }

  set answer(text: string) {
    const message = this.#turns.at(-1)?.messages.at(-1);
    if (message !== undefined) message.content = text;
  }

  /** Adds the newest turn. */
  add(turn: bigint, pieces: InputAppend[], answer: string): void {
    const messages = this.hasPrompts ? messagesOf(pieces) : [];
    messages.push(Message.create({ role: Role.ASSISTANT, content: answer }));
    this.#turns.push(TurnRestore.create({ turn, messages }));
  }

  /**
   * Returns the newest answer up to the first position, as an orchestrator shortens it. `output` is the output whose text
   * is the answer. `sent` is how much of each output was sent.
   */
  shortened(positions: OutputPosition[], output: string, sent: OutputPosition[]): string {
    const exact = positions.find(({ name }) => name === output);
    if (exact !== undefined) return textUntil(this.answer, exact.position);
    for (const { name, position } of positions) {
      const whole = sent.find((each) => each.name === name)?.position;
      const characters = [...this.answer];
      if (whole) return shorten(characters, Math.round(characters.length * Math.min(1, Number(position) / Number(whole))));
    }
    return this.answer;
  }

  /** Returns the events that restore all turns. */
  events(): ConverseRequest[] {
    return this.#turns.map((value) => ConverseRequest.create({ event: { $case: "restore", value } }));
  }
}

/** Returns the first `position` bytes of a text in UTF-8. Throws INVALID_POSITION if they end within a character. */
export function textUntil(text: string, position: bigint): string {
  const bytes = Buffer.from(text);
  const end = Math.min(Number(position), bytes.length);
  if ((bytes[end] ?? 0) >> 6 === 0b10) {
    const problem = `position ${position} is within a character of the text; use the end of a character`;
    throw failure(status.INVALID_ARGUMENT, "INVALID_POSITION", problem);
  }
  return bytes.toString("utf8", 0, end);
}

/** Returns the first `length` characters of an answer, without a word that is cut in the middle. */
function shorten(characters: string[], length: number): string {
  const heard = characters.slice(0, length).join("");
  const isWordCut = length < characters.length && !/^\s$/u.test(characters[length]!);
  return (isWordCut ? heard.replace(/(^|\s)\S*$/u, "") : heard).trimEnd();
}
