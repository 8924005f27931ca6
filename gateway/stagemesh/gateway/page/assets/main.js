/** The page: the choice of a model, its pipeline, and the prompts. */

import { getJson, keepToken, readToken } from "./api.js";
import { Conversation } from "./conversation.js";
import { Graph, narrow } from "./graph.js";
import { Log } from "./log.js";
import { missingMicrophone } from "./microphone.js";
import { SingleAnswers, drawImage, readAloud } from "./single_answers.js";

const POLL_MS = 1000;

const element = (id) => document.getElementById(id);
const [model, prompt, send, speak, stop] = ["model", "prompt", "send", "speak", "interrupt"].map(element);
const log = new Log(element("log"));
const graph = new Graph(element("graph"));

let mode = null;
let opened = new Map();
let pipeline = null;
let poll = 0;

const MODES = {
  talk: {
    label: "Talk",
    hint: "Ask anything",
    fits: ({ kinds }) => kinds.has("text"),
    open: (name, { detects_turns: detectsTurns, kinds }) => {
      const speaks = kinds.has("audio");
      return new Conversation({ model: name, detectsTurns, speaks, log, onChange: showState, onError: report });
    },
  },
  image: {
    label: "Image",
    hint: "Describe an image",
    fits: ({ kinds }) => kinds.has("image"),
    open: (name) => new SingleAnswers(drawImage, { model: name, log, onChange: showState }),
  },
  read: {
    label: "Read aloud",
    hint: "Write a text to be read aloud",
    fits: ({ kinds, speaks_input: speaksInput }) => kinds.has("audio") && (speaksInput || !kinds.has("text")),
    open: (name) => new SingleAnswers(readAloud, { model: name, log, onChange: showState }),
  },
};

async function listModels() {
  clearError();
  try {
    const { data } = await getJson("v1/models");
    // Only the request for a single model says why none can be used.
    if (!data.length) await getJson("v1/models/none");
    model.replaceChildren(...data.map(({ id }) => new Option(id)));
    model.closest("label").hidden = false;
    element("token-form").hidden = true;
    element("forget").hidden = !readToken();
    await chooseModel();
  } catch (error) {
    report(error);
  }
}

async function chooseModel() {
  const number = ++poll;
  clearError();
  pipeline = null;
  const left = [...opened.values()];
  opened = new Map();
  await changeMode(null);
  await Promise.all(left.map((each) => each.close()));
  log.clear();
  await watch(number);
}

/** Shows the pipeline of the model each second, until another model is chosen. */
async function watch(number) {
  if (number !== poll) return;
  if (document.visibilityState === "visible") {
    try {
      const state = await getJson(`v1/stagemesh/pipelines/${encodeURIComponent(model.value)}`);
      if (number !== poll) return;
      await showPipeline(state);
    } catch (error) {
      if (error.status === 401) {
        report(error);
        return;
      }
      element("status").textContent = error.message;
      if (pipeline === null) report(error);
    }
  }
  setTimeout(() => watch(number), POLL_MS);
}

async function showPipeline(state) {
  const card = element("pipeline");
  // A narrow page shows the messages first.
  if (card.hidden) card.open = !narrow.matches;
  card.hidden = false;
  graph.show(state);
  const queue = state.queued ? `, ${state.queued} of ${state.max_queued} queued` : "";
  element("status").textContent = `${state.in_flight} of ${state.max_in_flight} requests in flight${queue}`;
  const isNew = pipeline === null;
  const sent = state.outputs.filter((output) => !output.stored);
  pipeline = { ...state, kinds: new Set(sent.map((output) => output.kind)) };
  if (isNew) await offerModes();
}

async function offerModes() {
  clearError();
  const names = Object.keys(MODES).filter((name) => MODES[name].fits(pipeline));
  const choices = names.map((name) => {
    const label = document.createElement("label");
    const input = Object.assign(document.createElement("input"), { type: "radio", name: "mode", value: name });
    input.checked = name === names[0];
    label.append(input, MODES[name].label);
    return label;
  });
  element("modes").replaceChildren(element("modes").querySelector("legend"), ...choices);
  element("modes").hidden = names.length < 2;
  if (!names.length) report(new Error(`${model.value} has no text, image or audio output that this page can show.`));
  await changeMode(names[0] ?? null);
}

async function changeMode(name) {
  const before = mode;
  // A conversation continues when its mode is chosen again.
  if (name !== null && !opened.has(name)) opened.set(name, MODES[name].open(model.value, pipeline));
  mode = opened.get(name) ?? null;
  prompt.placeholder = name === null ? "" : MODES[name].hint;
  const acceptsSpeech = pipeline?.detects_turns || pipeline?.stages.some((stage) => stage.accepts_media);
  speak.hidden = name !== "talk" || !acceptsSpeech;
  const missing = missingMicrophone();
  speak.disabled = missing !== null;
  speak.title = missing ?? "Speak";
  showState();
  await before?.pause();
}

function showState() {
  const isBusy = mode?.isBusy ?? false;
  const isListening = mode?.isListening ?? false;
  if (!isBusy && document.activeElement === stop) prompt.focus();
  prompt.disabled = mode === null;
  send.disabled = mode === null || !prompt.value.trim();
  stop.hidden = !isBusy;
  speak.setAttribute("aria-pressed", isListening);
}

async function submit() {
  const text = prompt.value.trim();
  if (mode === null || !text) return;
  clearError();
  prompt.value = "";
  showState();
  try {
    await mode.send(text);
  } catch (error) {
    prompt.value ||= text;
    report(error);
  }
  showState();
}

async function toggleSpeech() {
  clearError();
  speak.disabled = true;
  try {
    await (mode.isListening ? mode.endSpeech() : mode.listen());
  } catch (error) {
    report(error);
  } finally {
    speak.disabled = false;
  }
}

function report(error) {
  element("error").textContent = error.message;
  // The form for the token says it in the words of the page.
  element("error").hidden = error.status === 401 && !readToken();
  if (error.status !== 401) return;
  element("token-form").hidden = false;
  element("token").focus();
}

function clearError() {
  element("error").hidden = true;
}

element("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken(element("token").value.trim());
  element("token").value = "";
  listModels();
});
element("forget").addEventListener("click", () => {
  keepToken("");
  location.reload();
});
element("modes").addEventListener("change", (event) => changeMode(event.target.value));
element("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
prompt.addEventListener("input", showState);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") mode?.interrupt();
});
model.addEventListener("change", chooseModel);
stop.addEventListener("click", () => mode.interrupt());
speak.addEventListener("click", toggleSpeech);
listModels();
