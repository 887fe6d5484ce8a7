"""Modules of the page alone, in the browser that runs them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.helpers.chromium import Tab
from tests.helpers.gateway_rig import Rig

RENDER = """
(async (text) => {
  const { renderMarkdown } = await import(new URL("page/markdown.js", document.baseURI));
  const container = document.createElement("div");
  renderMarkdown(container, text);
  container.querySelectorAll(".code-head, [tabindex]").forEach((e) => {
    if (e.matches(".code-head")) { e.remove(); }
    else { [...e.attributes].forEach((a) => e.removeAttribute(a.name)); }
  });
  for (const link of container.querySelectorAll("a")) {
    link.removeAttribute("target");
    link.removeAttribute("rel");
  }
  container.querySelectorAll(".code-block").forEach((e) => e.replaceWith(...e.childNodes));
  return container.innerHTML;
})
"""


async def call(tab: Tab, function: str, argument: object) -> Any:
    return await tab.evaluate(f"{function}({json.dumps(argument)})")


MARKDOWN = [
    ("plain", "<p>plain</p>"),
    ("a\nb\n\nc", "<p>a<br>b</p><p>c</p>"),
    ("**a** *b* __c__", "<p><strong>a</strong> <em>b</em> <strong>c</strong></p>"),
    ("_d_ ~~e~~ ***f***", "<p><em>d</em> <del>e</del> <strong><em>f</em></strong></p>"),
    ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
    ("snake_case_name 2 * 3 * 4 **open", "<p>snake_case_name 2 * 3 * 4 **open</p>"),
    ("`a*b*` ``c`d`` `open", "<p><code>a*b*</code> <code>c`d</code> `open</p>"),
    (r"\*a\* 1 \< 2", "<p>*a* 1 &lt; 2</p>"),
    ("# A #\n###### B", "<h3>A</h3><h6>B</h6>"),
    ("#no", "<p>#no</p>"),
    ("```py\nx = `1`\n\ny\n```\nz", "<pre><code>x = `1`\n\ny</code></pre><p>z</p>"),
    ("~~~\n```\n~~~", "<pre><code>```</code></pre>"),
    ("```\nopen", "<pre><code>open</code></pre>"),
    ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("1. a\n\n2. b\n\nc", "<ol><li>a</li><li>b</li></ol><p>c</p>"),
    ("- a\n  - b\n    c\n- d", "<ul><li>a<ul><li>b<br>c</li></ul></li><li>d</li></ul>"),
    ("1. a\n   ```\n   x\n   ```", "<ol><li>a<pre><code>x</code></pre></li></ol>"),
    ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
    ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
    ("* * *", "<hr>"),
    ("|a|b|\n|-|:-:|\n|1|**2**|", '<div><table><thead><tr><th class="align-start">a</th>'
     '<th class="align-center">b</th></tr></thead><tbody><tr><td class="align-start">1</td>'
     '<td class="align-center"><strong>2</strong></td></tr></tbody></table></div>'),
    ("a | b", "<p>a | b</p>"),
    ("[a](https://x.org/(b))", '<p><a href="https://x.org/(b)">a</a></p>'),
    ("see https://x.org/a, ok", '<p>see <a href="https://x.org/a">https://x.org/a</a>, ok</p>'),
    ("[a](javascript:alert(1)) [b](data:text/html,x) [c](/etc)",
     "<p>[a](javascript:alert(1)) [b](data:text/html,x) [c](/etc)</p>"),
    ("<b>&amp;</b>", "<p>&lt;b&gt;&amp;amp;&lt;/b&gt;</p>"),
    ("", ""),
]  # fmt: skip


async def test_markdown(rig: Rig, tab: Tab) -> None:
    await tab.open(f"{rig.url}/")
    for text, html in MARKDOWN:
        assert await call(tab, RENDER, text) == html, text


PARSE = """
(async (text) => {
  const { parseBlocks } = await import(new URL("page/markdown_blocks.js", document.baseURI));
  const { parseInline } = await import(new URL("page/markdown_inline.js", document.baseURI));
  parseBlocks(text).forEach((block) => parseInline(block.text ?? ""));
})
"""
REPEATED = (
    "**a ", "**", "*", "[", "[a](", "`", "``` `", "> ", "- ", "* ", "_a_", "|-", "| a ", "# ", "\\",
    "http://a.", "~~",
)  # fmt: skip


async def test_markdown_takes_no_time_for_what_repeats(rig: Rig, tab: Tab) -> None:
    await tab.open(f"{rig.url}/")
    for piece in REPEATED:
        for text in (piece * 20_000, f"{piece}\n" * 20_000, piece + " " * 50_000 + "x"):
            begin_s = time.monotonic()
            await call(tab, PARSE, text)
            assert time.monotonic() - begin_s < 10.0, piece


GROW = """
(async (text) => {
  const { renderMarkdown } = await import(new URL("page/markdown.js", document.baseURI));
  const [whole, grown] = [document.createElement("div"), document.createElement("div")];
  renderMarkdown(whole, text);
  renderMarkdown(grown, text.slice(0, 5));
  const first = grown.firstElementChild;
  for (let end = 5; end <= text.length; end += 1) { renderMarkdown(grown, text.slice(0, end)); }
  return [whole.innerHTML === grown.innerHTML, first === grown.firstElementChild];
})
"""


async def test_a_growing_text_ends_as_the_whole_and_keeps_what_stands(rig: Rig, tab: Tab) -> None:
    await tab.open(f"{rig.url}/")
    text = "Done\n\n" + "\n\n".join(source for source, _ in MARKDOWN)
    assert await call(tab, GROW, text) == [True, True]


EVENTS = """
(async ([text, size]) => {
  const { eventData } = await import(new URL("page/event_stream.js", document.baseURI));
  const bytes = new TextEncoder().encode(text);
  const stream = new ReadableStream({ start(controller) {
    for (let at = 0; at < bytes.length; at += size) {
      controller.enqueue(bytes.slice(at, at + size));
    }
    controller.close();
  } });
  const events = [];
  for await (const data of eventData(stream)) { events.push(data); }
  return events;
})
"""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
async def test_events_do_not_depend_on_how_bytes_arrive(rig: Rig, tab: Tab, end: str) -> None:
    await tab.open(f"{rig.url}/")
    lines = [
        ": comment",
        "",
        'data: {"a":"é🌍"}',
        "",
        "event: x",
        "data:b",
        "data: c",
        "",
        "data: cut",
    ]
    for size in (1, 2, 3, 7, 1000):
        events = await call(tab, EVENTS, [end.join(lines), size])
        assert events == ['{"a":"é🌍"}', "b\nc"]
