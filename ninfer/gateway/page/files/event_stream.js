// Server-sent events out of a stream of bytes, however these are cut.

/** The data of each event; comments and other fields are skipped. */
export async function* eventData(bytes) {
  let lines = [];
  for await (const line of textLines(bytes)) {
    if (line === "") {
      if (lines.length > 0) {
        yield lines.join("\n");
      }
      lines = [];
    } else if (line.startsWith("data:")) {
      lines.push(line.slice(line[5] === " " ? 6 : 5));
    }
  }
}

/** Whole lines without their ends; the last one only if it was ended. */
async function* textLines(bytes) {
  const reader = bytes.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) {
        return;
      }
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        yield line.endsWith("\r") ? line.slice(0, -1) : line;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
