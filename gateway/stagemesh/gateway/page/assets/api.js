/** Calls of the gateway: HTTP, server-sent events and WebSockets, with the token of this tab. */

const TOKEN = "stagemesh.token";

/** An error that the gateway reported. Its message says what is wrong and what to do. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Returns the token of this tab, or an empty text. */
export function readToken() {
  return sessionStorage.getItem(TOKEN) ?? "";
}

/** Keeps a token until the tab is closed. An empty text removes it. */
export function keepToken(token) {
  if (token) sessionStorage.setItem(TOKEN, token);
  else sessionStorage.removeItem(TOKEN);
}

/** Sends a request. Returns its response. Throws ApiError if the gateway rejects it or cannot be reached. */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (readToken()) headers.Authorization = `Bearer ${readToken()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), {
      method: body === undefined ? "GET" : "POST",
      body: body === undefined ? undefined : JSON.stringify(body),
      headers,
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The gateway cannot be reached. Check that it runs, then try again.");
  }
  if (!response.ok) throw await rejection(response);
  return response;
}

/** Returns the JSON of a response. Throws ApiError as `request` does. */
export async function getJson(path) {
  return (await request(path)).json();
}

/** Yields the server-sent events of a response as objects. Throws ApiError if one of them is an error. */
export async function* events(response) {
  let rest = "";
  for await (const text of chunks(response.body.pipeThrough(new TextDecoderStream()))) {
    const parts = (rest + text).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const line = part.split("\n").find((each) => each.startsWith("data: "));
      if (line === undefined || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice("data: ".length));
      if (event.error) throw new ApiError(event.error.message, event.error);
      yield event;
    }
  }
}

/**
 * Yields the chunks of a stream. Throws ApiError if the connection breaks.
 *
 * Not every browser can iterate over a stream itself.
 */
export async function* chunks(stream) {
  const reader = stream.getReader();
  const next = () =>
    reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The answer broke off. Try again; the logs of the gateway and the stages may say why.");
    });
  try {
    for (let read = await next(); !read.done; read = await next()) yield read.value;
  } finally {
    // It fails if the connection broke, which `next` has reported.
    reader.cancel().catch(() => {});
  }
}

/**
 * Opens a WebSocket for a model. Resolves when it is open.
 *
 * Throws ApiError if it cannot be opened. Browsers hide the response that says why, so it is asked for by HTTP.
 */
export async function openSocket(path, model) {
  const url = new URL(`${path}?model=${encodeURIComponent(model)}`, document.baseURI);
  url.protocol = url.protocol.replace("http", "ws");
  const protocols = ["realtime"];
  if (readToken()) protocols.push(`openai-insecure-api-key.${readToken()}`);
  let socket;
  try {
    socket = new WebSocket(url, protocols);
  } catch {
    throw new ApiError("The token has characters that no token has. Enter another one.", { status: 401 });
  }
  const opened = await new Promise((resolve) => {
    socket.addEventListener("open", () => resolve(true), { once: true });
    socket.addEventListener("close", () => resolve(false), { once: true });
  });
  if (opened) return socket;
  await request(`v1/models/${encodeURIComponent(model)}`);
  throw new ApiError("The gateway closed the connection. Try again.");
}

async function rejection(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return new ApiError(error.message, { status: response.status, code: error.code });
  } catch {
    return new ApiError(`The gateway answered with status ${response.status}.`, { status: response.status });
  }
}
