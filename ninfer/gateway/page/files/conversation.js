// The conversation: what was said, kept in this browser, and what of it a request carries.
//
// A message has a role and a text. One of the assistant's also has
//   thought, thoughtMs   what it thought before, and for how long
//   calls                [{id, name, arguments}] of tools
//   state                streaming | done | stopped | failed | interrupted
//   note                 why it ended as it did, when that is worth a line
//   usage, rate          tokens, and tokens a second
// One of a tool has callId and name.

import { isOwnKey, loadJson, saveJson } from "./storage.js";

const NAME = "conversation";
export const LEFT_NOTE = "The page was left before the answer was complete.";
const ROLES = new Set(["user", "assistant", "tool"]);

export class Conversation {
  constructor() {
    this.messages = restored(loadJson(NAME));
  }

  get last() {
    return this.messages.at(-1) ?? null;
  }

  add(message) {
    this.messages.push(message);
    return message;
  }

  replace(messages) {
    this.messages = messages;
  }

  /** False when the browser has no room for it. */
  save() {
    return saveJson(NAME, this.messages.length > 0 ? this.messages : null);
  }

  /** Another tab wrote it. */
  reload() {
    this.messages = restored(loadJson(NAME));
  }

  static isStoredAs(key) {
    return isOwnKey(key, NAME);
  }

  /** Calls of the last answer that have no result yet. */
  openCalls() {
    const answer = this.messages.findLast((message) => message.role !== "tool");
    if (answer?.role !== "assistant" || answer.state !== "done") {
      return [];
    }
    const answered = new Set(this.messages.map((message) => message.callId));
    return answer.calls.filter((call) => !answered.has(call.id));
  }

  /** As the API wants it; answers that said nothing are left out. */
  toRequest(systemPrompt) {
    const system = systemPrompt ? [{ role: "system", content: systemPrompt }] : [];
    return [...system, ...this.messages.filter(saysSomething).map(toApi)];
  }
}

export function userMessage(text) {
  return { role: "user", text };
}

export function toolMessage(call, text) {
  return { role: "tool", text, callId: call.id, name: call.name };
}

export function assistantMessage() {
  return {
    role: "assistant", text: "", thought: "", thoughtMs: null, calls: [],
    state: "streaming", note: null, usage: null, rate: null,
  };
}

function restored(stored) {
  if (!Array.isArray(stored)) {
    return [];
  }
  const known = stored.filter((item) => ROLES.has(item?.role) && typeof item.text === "string");
  return known.map((item) => (item.role === "assistant" ? restoredAnswer(item) : item));
}

function restoredAnswer(item) {
  const message = { ...assistantMessage(), ...item };
  message.calls = Array.isArray(message.calls) ? message.calls.filter(Boolean) : [];
  if (message.state === "streaming") {
    message.state = "interrupted";
    message.note = LEFT_NOTE;
  }
  return message;
}

function saysSomething(message) {
  return message.role !== "assistant" || message.text !== "" || wholeCalls(message).length > 0;
}

/** Of an answer that was cut off nobody knows whether its calls are complete. */
function wholeCalls(message) {
  return message.state === "done" ? message.calls : [];
}

function toApi(message) {
  if (message.role === "user") {
    return { role: "user", content: message.text };
  }
  if (message.role === "tool") {
    return { role: "tool", tool_call_id: message.callId, content: message.text };
  }
  const answer = { role: "assistant", content: message.text };
  if (message.thought) {
    answer.reasoning_content = message.thought;
  }
  const calls = wholeCalls(message);
  if (calls.length > 0) {
    answer.tool_calls = calls.map((call) => ({
      id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
    }));
  }
  return answer;
}
