"""What a user does with the page, for tests."""

from __future__ import annotations

from tests.helpers.chromium import Tab

ANSWERS = "document.querySelectorAll('.message.assistant')"


async def open_page(tab: Tab, url: str) -> None:
    """Loaded, and its first request for the status answered."""
    await tab.open(f"{url}/")
    await tab.until("document.querySelector('#health').dataset.state")


async def ask(tab: Tab, text: str) -> None:
    await tab.evaluate("document.querySelector('#prompt').focus()")
    await tab.type(text)
    await tab.press("Enter")


async def answered(tab: Tab, count: int = 1) -> str:
    """The last answer's text, once there are `count` and none is being written."""
    await tab.until(f"{ANSWERS}.length === {count} && !document.querySelector('.streaming')")
    return await last_text(tab)


async def last_text(tab: Tab) -> str:
    """What the last answer says, without its thought."""
    value = await tab.evaluate(
        f"[...{ANSWERS}].at(-1)?.querySelector('.body > .markdown')?.innerText ?? ''"
    )
    assert isinstance(value, str)
    return value
