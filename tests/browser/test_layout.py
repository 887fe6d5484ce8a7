"""Colours, sizes, focus order and names for those who do not see the page."""

from __future__ import annotations

import asyncio

import pytest

from tests.helpers.chat_page import answered, ask, open_page
from tests.helpers.chromium import Tab
from tests.helpers.fake_engine import hold, say
from tests.helpers.gateway_rig import Rig

LIGHT, DARK = "rgb(247, 248, 248)", "rgb(20, 24, 26)"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
LONG = (
    "word " * 40
    + "w" * 300
    + "\n\n```\n"
    + "code " * 100
    + "\n```\n\n"
    + "|a" * 30
    + "|\n"
    + "|-" * 30
    + "|"
)
CONTRASTS = """
(() => {
  const channels = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = (text) => {
    const [r, g, b] = channels(text).map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const backOf = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const back = getComputedStyle(at).backgroundColor;
      if (!back.endsWith(", 0)")) { return back; }
    }
  };
  const faint = [];
  for (const element of document.querySelectorAll("body *")) {
    const hasText = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!hasText || !element.checkVisibility() || element.matches("option")) { continue; }
    const [a, b] = [light(getComputedStyle(element).color), light(backOf(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) { faint.push(`${element.tagName} ${element.className} ${contrast}`); }
  }
  return faint;
})()
"""
FOCUSED = """
((e) => e.id || e.dataset.view || e.className.replace("small", "") || (
  e.matches("body") ? "BODY" : e.innerText))(document.activeElement)
"""
NAMELESS = """
[...document.querySelectorAll("button, a, input, select, textarea, summary, [tabindex='0']")]
  .filter((e) => e.checkVisibility())
  .filter((e) => !(e.innerText?.trim() || e.labels?.length || e.ariaLabel))
  .map((e) => e.outerHTML)
"""


async def test_colours_follow_the_system_and_the_choice(rig: Rig, tab: Tab) -> None:
    for scheme, colour in (("light", LIGHT), ("dark", DARK)):
        await tab.prefer(color_scheme=scheme)
        await open_page(tab, rig.url)
        assert await tab.evaluate(BACKGROUND) == colour
    choose = "(() => {{ const e = document.querySelector('#theme'); e.value = '{}';"
    change = " e.dispatchEvent(new Event('change')); })()"
    for choice, colour in (("light", LIGHT), ("dark", DARK), ("light", LIGHT)):
        await tab.evaluate(choose.format(choice) + change)
        assert await tab.evaluate(BACKGROUND) == colour
    await open_page(tab, rig.url)
    assert await tab.evaluate(BACKGROUND) == LIGHT
    await tab.evaluate(choose.format("system") + change)
    await open_page(tab, rig.url)
    assert await tab.evaluate(BACKGROUND) == DARK


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_all_text_has_contrast_and_all_controls_a_name(
    rig: Rig, tab: Tab, scheme: str
) -> None:
    rig.engine.script = say(
        "# Head\n\nText `code` [link](https://example.org)\n\n> quote", reasoning=("x",)
    )
    await tab.prefer(color_scheme=scheme)
    await open_page(tab, rig.url)
    await ask(tab, "hi")
    await answered(tab)
    await tab.evaluate("document.querySelector('.thought').open = true")
    for view in ("chat", "status"):
        await tab.click(f"[data-view={view}]")
        assert await tab.evaluate(CONTRASTS) == []
        assert await tab.evaluate(NAMELESS) == []
    await tab.click("#open-settings")
    assert await tab.evaluate(NAMELESS) == []
    assert await tab.evaluate(
        "[...document.querySelectorAll('[id]')].length"
    ) == await tab.evaluate("new Set([...document.querySelectorAll('[id]')].map((e) => e.id)).size")


@pytest.mark.parametrize(("width", "height"), [(320, 568), (768, 1024), (1920, 1080)])
async def test_nothing_is_wider_than_the_window(
    rig: Rig, tab: Tab, width: int, height: int
) -> None:
    rig.engine.script = say(LONG, reasoning=("t" * 500,))
    await tab.resize(width, height)
    await open_page(tab, rig.url)
    await ask(tab, "hi")
    await answered(tab)
    await tab.evaluate("document.querySelector('.thought').open = true")
    fits = (
        "document.scrollingElement.scrollWidth <= innerWidth"
        " && ['#log', '#status-view'].every((name) => {"
        " const e = document.querySelector(name); return e.scrollWidth <= e.clientWidth; })"
    )
    assert await tab.evaluate(fits)
    box = "document.querySelector('#send').getBoundingClientRect()"
    assert await tab.evaluate(f"{box}.right <= innerWidth && {box}.bottom <= innerHeight")
    await tab.click("[data-view=status]")
    assert await tab.evaluate(fits)
    await tab.click("#open-settings")
    box = "document.querySelector('#settings').getBoundingClientRect()"
    assert await tab.evaluate(f"{box}.left >= 0 && {box}.right <= innerWidth")


async def test_the_keyboard_is_enough(rig: Rig, tab: Tab) -> None:
    await open_page(tab, rig.url)
    assert await tab.evaluate("document.activeElement.id") == "prompt"
    await tab.type("one")
    await tab.press("Enter", shift=True)
    await tab.type("two")
    await tab.press("Enter")
    await answered(tab)
    assert rig.frontend.chats[-1].messages[-1].text == "one\ntwo"
    names = []
    for _ in range(12):
        await tab.press("Tab")
        names.append(await tab.evaluate(FOCUSED))
    assert [name for name in names if name != "BODY"] == [
        "send", "skip", "chat", "status", "theme", "new-chat", "open-settings", "log",
        "Retry", "Copy", "prompt",
    ]  # fmt: skip
    await tab.evaluate("document.querySelector('#open-settings').focus()")
    await tab.press("Enter")
    await tab.until("document.querySelector('#settings').open")
    for _ in range(30):
        await tab.press("Tab")
        assert await tab.evaluate("document.activeElement.closest('#settings, body') !== null")
    await tab.press("Escape")
    await tab.until("!document.querySelector('#settings').open")
    assert await tab.evaluate("document.activeElement.id") == "open-settings"
    await tab.evaluate("document.querySelector('[data-view=status]').focus()")
    await tab.press("Enter")
    await tab.until("!document.querySelector('#status-view').hidden")
    assert await tab.evaluate("document.querySelector('[data-view=status]').ariaCurrent") == "page"


async def test_escape_in_a_dialog_stops_no_answer(rig: Rig, tab: Tab) -> None:
    gate = asyncio.Event()
    rig.engine.script = hold(gate, "Text")
    await open_page(tab, rig.url)
    await ask(tab, "hi")
    await tab.until("document.querySelector('.streaming .markdown')?.innerText")
    await tab.click("#open-settings")
    await tab.press("Escape")
    await tab.until("!document.querySelector('#settings').open")
    gate.set()
    assert await answered(tab) == "Text done"


async def test_a_reader_who_scrolled_up_stays_there(rig: Rig, tab: Tab) -> None:
    gate = asyncio.Event()
    rig.engine.script = hold(gate, "line\n\n" * 200)
    await open_page(tab, rig.url)
    await ask(tab, "hi")
    at_end = (
        "((e) => e.scrollHeight - e.scrollTop - e.clientHeight < 2)(document.querySelector('#log'))"
    )
    await tab.until(f"document.querySelectorAll('.streaming p').length === 200 && {at_end}")
    await tab.evaluate("document.querySelector('#log').scrollTop = 0")
    gate.set()
    await answered(tab)
    assert await tab.evaluate("document.querySelector('#log').scrollTop") == 0


async def test_nothing_moves_for_those_who_want_it_so(rig: Rig, tab: Tab) -> None:
    rig.engine.script = hold(asyncio.Event(), "Text")
    await tab.prefer(reduced_motion="reduce")
    await open_page(tab, rig.url)
    await ask(tab, "hi")
    await tab.until("document.querySelector('.streaming .markdown p')")
    cursor = "getComputedStyle(document.querySelector('.streaming .markdown p'), '::after')"
    assert await tab.evaluate(f"{cursor}.animationName") == "none"
    await tab.prefer(reduced_motion="no-preference")
    assert await tab.evaluate(f"{cursor}.animationName") == "blink"
