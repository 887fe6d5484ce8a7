// Requests to the server this page came from, whatever path a proxy puts before it.

import { loadApiKey } from "./storage.js";
import { eventData } from "./event_stream.js";

const BASE = new URL("../v1/", import.meta.url);

/** An answer that is an error; status 0 when there was no answer, or it ended too early. */
export class ApiError extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export async function getStatus(signal) {
  const response = await send("status", { signal, cache: "no-store" });
  return response.json();
}

/** Chunks of a streamed chat completion, as the server sends them. Aborting `signal` closes the
    connection, and the server ends the request. */
export async function* streamChat(body, signal) {
  const response = await send("chat/completions", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  });
  let isComplete = false;
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") {
      isComplete = true;
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) {
      throw new ApiError(response.status, chunk.error.message, chunk.error.code);
    }
    yield chunk;
  }
  if (!isComplete) {
    throw new ApiError(0, "The connection ended before the answer was complete.");
  }
}

async function send(path, options) {
  const headers = { ...options.headers };
  const key = loadApiKey();
  if (key) {
    headers.Authorization = `Bearer ${key}`;
  }
  let response;
  try {
    response = await fetch(new URL(path, BASE), { ...options, headers });
  } catch (error) {
    if (options.signal?.aborted) {
      throw error;
    }
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (!response.ok) {
    throw await errorOf(response);
  }
  return response;
}

async function errorOf(response) {
  if (response.status === 401) {
    return new ApiError(401, "The server asks for an API key.", "invalid_api_key");
  }
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // A proxy's own page: the status says it all.
  }
  const message = error.message ?? `The server answered with status ${response.status}.`;
  return new ApiError(response.status, message, error.code ?? null);
}
