/** A conversation by the realtime API: prompts are written or spoken, answers are heard and can be interrupted. */

import { ApiError, openSocket } from "./api.js";
import { Microphone } from "./microphone.js";
import { RATE_HZ, decodePcm, fromBase64, toBase64 } from "./pcm.js";
import { Playback, openOutput } from "./playback.js";

/** An answer of the model that is being made or heard. */
class Turn {
  playback = null;
  responseId = undefined;
  itemId = null;
  isRunning = true;
  isInterrupted = false;

  constructor(answer) {
    this.id = crypto.getRandomValues(new Uint32Array(2)).join("-");
    this.answer = answer;
  }

  get isBusy() {
    return this.isRunning || (this.playback?.isRunning ?? false);
  }
}

/** The conversation with one model. It connects when the first prompt is sent. */
export class Conversation {
  #model;
  #detectsTurns;
  #speaks;
  #log;
  #onChange;
  #onError;
  #socket = null;
  #connecting = null;
  #turn = null;
  #asked = [];
  #turns = new Map();
  #microphone = null;
  #spokenBytes = 0;

  /** Calls `onChange` when `isBusy` or `isListening` may have changed, and `onError` with errors of no answer. */
  constructor({ model, detectsTurns, speaks, log, onChange, onError }) {
    this.#model = model;
    this.#detectsTurns = detectsTurns;
    this.#speaks = speaks;
    this.#log = log;
    this.#onChange = onChange;
    this.#onError = onError;
  }

  /** Whether an answer is being made or heard. */
  get isBusy() {
    return this.#turn?.isBusy ?? false;
  }

  /** Whether the microphone is open. */
  get isListening() {
    return this.#microphone !== null;
  }

  /** Sends a written prompt. Interrupts the answer before. Throws ApiError if the gateway cannot be reached. */
  async send(text) {
    openOutput();
    await this.#connect();
    this.interrupt();
    this.#log.addPrompt(text);
    const content = [{ type: "input_text", text }];
    this.#send("conversation.item.create", { item: { type: "message", role: "user", content } });
    this.#ask();
  }

  /** Opens the microphone. With the detection of turns, it remains open, and answers follow by themselves. */
  async listen() {
    openOutput();
    await this.#connect();
    if (!this.#detectsTurns) this.interrupt();
    this.#spokenBytes = 0;
    this.#microphone = new Microphone();
    try {
      await this.#microphone.open((pcm) => {
        this.#spokenBytes += pcm.length;
        this.#send("input_audio_buffer.append", { audio: toBase64(pcm) });
      });
    } catch (error) {
      await this.#hangUp();
      throw error;
    } finally {
      this.#onChange();
    }
  }

  /** Closes the microphone. Without the detection of turns, it asks for an answer to the speech. */
  async endSpeech() {
    await this.#hangUp();
    if (this.#detectsTurns) {
      this.#send("input_audio_buffer.clear");
    } else if (this.#spokenBytes) {
      this.#log.addPrompt(spoken(this.#spokenBytes / 2 / RATE_HZ));
      this.#send("input_audio_buffer.commit");
      this.#ask();
    }
    this.#onChange();
  }

  /** Stops the answer. Its text is shortened to what was heard, on the page and in the conversation. */
  interrupt() {
    const turn = this.#turn;
    if (!turn?.isBusy) return;
    turn.isInterrupted = true;
    const heard = turn.playback?.stop();
    // Named, because the gateway may have ended it for the speech of the user, and begun the next one.
    if (turn.isRunning) this.#send("response.cancel", { response_id: turn.responseId });
    if (heard !== undefined) {
      const at_ms = Math.floor((heard * 1000) / RATE_HZ);
      this.#send("conversation.item.truncate", { item_id: turn.itemId, content_index: 0, audio_end_ms: at_ms });
      this.#send("conversation.item.retrieve", { item_id: turn.itemId });
    } else if (this.#speaks && turn.itemId !== null) {
      // Its text has arrived, but none of its audio.
      this.#send("conversation.item.delete", { item_id: turn.itemId });
      turn.answer.replaceText("");
    }
    turn.answer.note("Interrupted");
    this.#onChange();
  }

  /** Stops the answer, and closes the microphone. The conversation can continue later. */
  async pause() {
    this.interrupt();
    if (this.isListening) this.#send("input_audio_buffer.clear");
    await this.#hangUp();
  }

  /** Ends the conversation. */
  async close() {
    await this.pause();
    const socket = this.#socket;
    this.#socket = null;
    socket?.close();
  }

  /** Connects once, even if several prompts wait for it. */
  async #connect() {
    if (this.#socket !== null) return;
    this.#connecting ??= openSocket("v1/realtime", this.#model).finally(() => (this.#connecting = null));
    const socket = await this.#connecting;
    if (this.#socket !== null) return;
    this.#socket = socket;
    socket.addEventListener("message", ({ data }) => this.#handle(JSON.parse(data)));
    socket.addEventListener("close", () => this.#lose(socket));
  }

  #send(type, fields = {}) {
    this.#socket?.send(JSON.stringify({ type, ...fields }));
  }

  #ask() {
    this.#turn = new Turn(this.#log.addAnswer());
    this.#asked.push(this.#turn);
    this.#send("response.create", { event_id: this.#turn.id });
    this.#onChange();
  }

  #handle(event) {
    switch (event.type) {
      case "response.created":
        this.#begin(event.response.id);
        break;
      case "response.output_text.delta":
      case "response.output_audio_transcript.delta":
        this.#addText(this.#turns.get(event.response_id), event);
        break;
      case "response.output_audio.delta":
        this.#addAudio(this.#turns.get(event.response_id), event);
        break;
      case "response.done":
        this.#end(this.#turns.get(event.response.id), event.response);
        break;
      case "conversation.item.retrieved":
        this.#showHeard(event.item);
        break;
      case "input_audio_buffer.speech_started":
        this.interrupt();
        break;
      case "input_audio_buffer.committed":
        if (this.#detectsTurns) this.#log.addPrompt(spoken());
        break;
      case "error":
        this.#fail(event.error);
        break;
      default:
    }
    this.#onChange();
  }

  /** An answer to detected speech was not asked for by the page. */
  #begin(responseId) {
    const turn = this.#asked.shift() ?? (this.#turn = new Turn(this.#log.addAnswer()));
    turn.responseId = responseId;
    this.#turns.set(responseId, turn);
  }

  #addText(turn, event) {
    turn.itemId = event.item_id;
    if (!turn.isInterrupted) turn.answer.append(event.delta);
  }

  #addAudio(turn, event) {
    turn.itemId = event.item_id;
    if (turn.isInterrupted) return;
    if (turn.playback === null) {
      turn.playback = new Playback();
      turn.answer.follow(turn.playback);
      turn.playback.ended.then(this.#onChange);
    }
    turn.playback.add(decodePcm(fromBase64(event.delta)));
  }

  #end(turn, response) {
    turn.isRunning = false;
    turn.playback?.complete();
    turn.answer.complete();
    const details = response.status_details;
    if (response.status === "failed") turn.answer.note(details.error.message, { isError: true });
    if (response.status === "incomplete") turn.answer.note("The answer reached its limit of tokens.");
  }

  #showHeard(item) {
    const turn = [...this.#turns.values()].find((each) => each.itemId === item.id);
    turn?.answer.replaceText(item.content[0].transcript);
  }

  #fail(error) {
    // The response may have ended by itself before the page cancelled it.
    if (error.code === "response_cancel_not_active") return;
    const turn = this.#asked.find((each) => each.id === error.event_id);
    if (turn === undefined) {
      this.#onError(new ApiError(error.message, error));
      return;
    }
    this.#asked = this.#asked.filter((each) => each !== turn);
    this.#stop(turn, error.message);
  }

  #lose(socket) {
    if (this.#socket !== socket) return;
    this.#socket = null;
    for (const turn of [...this.#asked, ...this.#turns.values()]) {
      if (turn.isRunning) this.#stop(turn, "The gateway closed the connection. Send the prompt again.");
    }
    this.#asked = [];
    this.#turns.clear();
    this.#hangUp().then(this.#onChange);
  }

  #stop(turn, message) {
    turn.isRunning = false;
    turn.playback?.complete();
    turn.answer.note(message, { isError: true });
    turn.answer.complete();
  }

  async #hangUp() {
    const microphone = this.#microphone;
    this.#microphone = null;
    await microphone?.close();
  }
}

function spoken(duration_s) {
  return duration_s === undefined ? "Spoken prompt" : `Spoken prompt, ${duration_s.toFixed(1)} s`;
}
