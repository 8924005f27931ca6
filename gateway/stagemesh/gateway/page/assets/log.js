/** The messages on the page. */

import { RATE_HZ } from "./pcm.js";

/** The list of messages. Follows the newest one unless the reader has scrolled away from it. */
export class Log {
  #element;

  constructor(element) {
    this.#element = element;
  }

  /** Adds a message of the user. */
  addPrompt(text) {
    this.#add("prompt").textContent = text;
  }

  /** Adds an answer, which is empty. Returns it. */
  addAnswer() {
    return new Answer(this.#add("answer"));
  }

  /** Removes all messages. */
  clear() {
    this.#element.replaceChildren();
  }

  #add(kind) {
    const message = create("article", `message ${kind}`);
    message.setAttribute("aria-label", kind === "prompt" ? "You" : "Answer");
    this.#element.append(message);
    message.scrollIntoView({ block: "end" });
    return message;
  }
}

/** An answer of the model: a text, an image, and how much of its audio has been heard. */
class Answer {
  #message;
  #text = create("p", "text");
  #image = null;
  #heard = null;
  #note = null;

  constructor(message) {
    this.#message = message;
    message.append(this.#text);
    // Screen readers read the answer when it is complete.
    message.setAttribute("aria-busy", "true");
  }

  append(text) {
    this.#text.append(text);
    this.#follow();
  }

  replaceText(text) {
    this.#text.textContent = text;
  }

  /** Shows an image, instead of the one before it. */
  showImage(url, { description, isPreview }) {
    if (this.#image === null) {
      this.#image = create("img", "");
      this.#image.addEventListener("load", () => this.#follow());
      this.#message.append(this.#image);
    }
    this.#image.src = url;
    this.#image.alt = isPreview ? `Preview: ${description}` : description;
    this.#image.classList.toggle("preview", isPreview);
    this.#image.dataset.shown = Number(this.#image.dataset.shown ?? 0) + 1;
  }

  /** Shows how much of the audio has been heard, until the playback ends. */
  follow(playback) {
    this.#heard = create("div", "heard");
    const bar = create("progress", "");
    const time = create("span", "note");
    bar.setAttribute("aria-label", "Heard");
    this.#heard.append(bar, time);
    this.#message.append(this.#heard);
    const show = () => {
      const { heard, received } = playback;
      bar.max = Math.max(received, 1);
      bar.value = heard;
      time.textContent = `${seconds(heard)} of ${seconds(received)}`;
      Object.assign(this.#heard.dataset, { heard, received, state: playback.isRunning ? "playing" : "ended" });
      if (playback.isRunning) requestAnimationFrame(show);
    };
    show();
    this.#follow();
    // Pages in the background have no animation frames.
    playback.ended.then(show);
  }

  /** Shows a remark below the answer, instead of the one before it. */
  note(text, { isError = false } = {}) {
    this.#note ??= this.#message.appendChild(create("p", ""));
    this.#note.className = isError ? "error" : "note";
    this.#note.textContent = text;
    this.#follow();
  }

  /** Declares that the answer will not change any more. */
  complete() {
    this.#message.setAttribute("aria-busy", "false");
  }

  #follow() {
    const { scrollHeight, scrollTop, clientHeight } = document.scrollingElement;
    if (scrollHeight - scrollTop - clientHeight < 200) this.#message.scrollIntoView({ block: "end" });
  }
}

function seconds(samples) {
  return `${(samples / RATE_HZ).toFixed(1)} s`;
}

function create(name, className) {
  const element = document.createElement(name);
  element.className = className;
  return element;
}
