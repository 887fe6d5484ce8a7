// One answer as it arrives: chunks of the stream go into a message of the conversation.

/** Add what a chunk brings. `now` in milliseconds. */
export function applyChunk(message, chunk, now) {
  const choice = chunk.choices?.[0];
  if (choice) {
    applyDelta(message, choice.delta ?? {}, now);
    if (choice.finish_reason) {
      message.note = noteOf(choice.finish_reason);
    }
  }
  if (chunk.usage) {
    message.usage = {
      prompt: chunk.usage.prompt_tokens,
      cached: chunk.usage.prompt_tokens_details?.cached_tokens ?? 0,
      completion: chunk.usage.completion_tokens,
    };
  }
  if (chunk.timings) {
    message.rate = chunk.timings.tokens_per_second ?? null;
  }
}

function applyDelta(message, delta, now) {
  if (delta.reasoning_content) {
    message.thoughtStart ??= now;
    message.thought += delta.reasoning_content;
    message.thoughtMs = now - message.thoughtStart;
  }
  if (delta.content) {
    message.text += delta.content;
  }
  for (const part of delta.tool_calls ?? []) {
    const call = (message.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id = part.id ?? call.id;
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
}

function noteOf(reason) {
  return reason === "length" ? "Cut off: the limit of tokens was reached." : null;
}

/** What is no part of the message once it is complete. */
export function settle(message, state, note = message.note) {
  message.state = state;
  message.note = note;
  delete message.thoughtStart;
}
