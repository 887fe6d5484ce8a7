"""The chat of the page over a gateway whose engine plays scripts."""

from __future__ import annotations

import asyncio

import pytest

from ninfer.contract.errors import Unavailable
from ninfer.options import ServeOptions
from tests.helpers.chat_page import ANSWERS, answered, ask, last_text, open_page
from tests.helpers.chromium import Tab
from tests.helpers.fake_engine import fail, hold, say
from tests.helpers.gateway_rig import HOST, PATIENT_LIMITS, Rig, running_gateway, until


async def test_text_is_shown_as_it_arrives(rig: Rig, tab: Tab) -> None:
    gate = asyncio.Event()
    rig.engine.script = hold(gate, "First ", "**second**")
    await open_page(tab, rig.url)
    await ask(tab, "hi")
    await tab.until("document.querySelector('.streaming .markdown')?.innerText === 'First second'")
    assert await tab.evaluate("document.querySelector('.streaming strong').textContent") == "second"
    assert await tab.evaluate("document.querySelector('#log').getAttribute('aria-busy')") == "true"
    assert await tab.evaluate("document.querySelector('.actions')") is None
    gate.set()
    assert await answered(tab) == "First second done"
    assert await tab.text("#announcer") == "The answer is complete."
    assert await tab.evaluate("document.querySelector('#log').hasAttribute('aria-busy')") is False


async def test_thinking_is_folded_and_opens_from_the_keyboard(rig: Rig, tab: Tab) -> None:
    rig.engine.script = say("Yes.", reasoning=("Hmm, ", "maybe."))
    await open_page(tab, rig.url)
    await ask(tab, "hi")
    assert await answered(tab) == "Yes."
    assert await tab.evaluate("document.querySelector('.thought').open") is False
    assert (await tab.text(".thought summary")).startswith("Thought for ")
    await tab.evaluate("document.querySelector('.thought summary').focus()")
    await tab.press("Enter")
    await tab.until("document.querySelector('.thought').open")
    assert await tab.text(".thought .markdown") == "Hmm, maybe."


@pytest.mark.parametrize("by", ["Escape", "button"])
async def test_stopping_ends_the_request_and_keeps_what_came(rig: Rig, tab: Tab, by: str) -> None:
    rig.engine.script = hold(asyncio.Event(), "Some text")
    await open_page(tab, rig.url)
    await ask(tab, "hi")
    await tab.until("document.querySelector('.streaming .markdown')?.innerText === 'Some text'")
    if by == "Escape":
        await tab.press("Escape")
    else:
        await tab.click("#stop")
    assert await answered(tab) == "Some text"
    assert await tab.text(".foot") == "Stopped."
    await until(lambda: rig.engine.handles[0].is_released)
    assert rig.engine.handles[0].is_cancelled
    assert await tab.evaluate("document.querySelector('#stop').hidden") is True


async def test_an_answer_can_be_had_again(rig: Rig, tab: Tab) -> None:
    rig.engine.script = say("One.")
    await open_page(tab, rig.url)
    await ask(tab, "hi")
    assert await answered(tab) == "One."
    rig.engine.script = say("Two.")
    await tab.evaluate("document.querySelector('.actions button').focus()")
    await tab.press("Enter")
    await tab.until(f"{ANSWERS}[0]?.innerText.startsWith('Two.')")
    assert await answered(tab) == "Two."
    first, second = rig.frontend.chats
    assert first.messages == second.messages


async def test_the_conversation_is_sent_and_survives_a_reload(rig: Rig, tab: Tab) -> None:
    rig.engine.script = say("Fine.", reasoning=("So so.",))
    await open_page(tab, rig.url)
    await ask(tab, "How?")
    await answered(tab)
    await open_page(tab, rig.url)
    assert await answered(tab) == "Fine."
    await ask(tab, "Why?")
    await answered(tab, 2)
    chat = rig.frontend.chats[-1]
    assert [(message.role, message.text) for message in chat.messages] == [
        ("user", "How?"), ("assistant", "Fine."), ("user", "Why?"),
    ]  # fmt: skip
    assert chat.messages[1].reasoning_content == "So so."


async def test_a_page_left_in_the_middle_says_so(rig: Rig, tab: Tab) -> None:
    rig.engine.script = hold(asyncio.Event(), "Half")
    await open_page(tab, rig.url)
    await ask(tab, "hi")
    await tab.until("document.querySelector('.streaming .markdown')?.innerText === 'Half'")
    await open_page(tab, rig.url)
    await until(lambda: rig.engine.handles[0].is_released)
    assert await answered(tab) == "Half"
    assert "left before" in await tab.text(".foot")


async def test_a_new_chat_can_be_undone(rig: Rig, tab: Tab) -> None:
    await open_page(tab, rig.url)
    await ask(tab, "hi")
    await answered(tab)
    await tab.click("#new-chat")
    await tab.until(f"{ANSWERS}.length === 0")
    assert await tab.evaluate("localStorage.getItem('ninfer.conversation')") is None
    await tab.click("#notice-action")
    assert await answered(tab) == "Hello"
    await tab.click("#new-chat")
    await open_page(tab, rig.url)
    assert await tab.evaluate(f"{ANSWERS}.length") == 0


async def test_what_a_model_writes_is_never_markup(rig: Rig, tab: Tab) -> None:
    rig.engine.script = say(
        "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\n\n",
        "[a](javascript:document.title='owned') [b](https://example.org/?q=1)\n\n",
        "```html\n<b>bold</b>\n```",
        reasoning=("<img src=y onerror=\"document.title='owned'\">",),
    )
    await open_page(tab, rig.url)
    await ask(tab, "<b>hi</b>")
    text = await answered(tab)
    assert "<script>document.title='owned'</script>" in text
    assert "<b>bold</b>" in text
    count = "(selector) => document.querySelectorAll(`#log ${selector}`).length"
    for tag in ("img", "script", "b", "iframe"):
        assert await tab.evaluate(f"({count})('{tag}')") == 0
    links = await tab.evaluate("[...document.querySelectorAll('#log a')].map((a) => a.href)")
    assert links == ["https://example.org/?q=1"]
    assert await tab.evaluate("document.title") == "NInfer"


async def test_an_error_is_shown_and_can_be_retried(rig: Rig, tab: Tab) -> None:
    await open_page(tab, rig.url)
    rig.engine.refusal = Unavailable("server_overloaded", "The queue is full.", 7.2)
    await ask(tab, "hi")
    await answered(tab)
    assert await tab.text(".foot.error") == "The queue is full."
    rig.engine.refusal = None
    await tab.click(".actions button")
    await tab.until("!document.querySelector('.foot.error')")
    assert await answered(tab) == "Hello"
    rig.engine.script = fail(Unavailable("engine_unavailable", "It broke."), "Part")
    await ask(tab, "again")
    assert await answered(tab, 2) == "Part"
    assert await tab.text(".foot.error") == "It broke."
    assert [text.split("status of ")[1][:3] for text in tab.complaints] == ["429"]
    tab.complaints.clear()


async def test_settings_survive_a_reload_and_are_sent(rig: Rig, tab: Tab) -> None:
    await open_page(tab, rig.url)
    await tab.click("#open-settings")
    values = {"system": "Be brief.", "temperature": "0.5", "topP": "0.9", "maxTokens": "7"}
    for name, value in values.items():
        await tab.evaluate(f"document.querySelector('#settings [name={name}]').focus()")
        await tab.type(value)
    await tab.evaluate("document.querySelector('#settings [name=thinking]').value = 'off'")
    await tab.click("#settings .primary")
    await tab.until("!document.querySelector('#settings').open")
    await open_page(tab, rig.url)
    await ask(tab, "hi")
    await answered(tab)
    params, chat = rig.frontend.params[-1], rig.frontend.chats[-1]
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.9, 7)
    assert chat.template_kwargs["enable_thinking"] is False
    assert [message.text for message in chat.messages] == ["Be brief.", "hi"]
    await tab.click("#open-settings")
    await tab.click("#reset-settings")
    await tab.click("#settings .primary")
    await ask(tab, "hi")
    await answered(tab, 2)
    assert rig.frontend.params[-1].temperature is None
    assert "enable_thinking" not in rig.frontend.chats[-1].template_kwargs


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", "2.5"), ("maxTokens", "0.5"), ("tools", "[{")]
)
async def test_settings_out_of_range_are_not_taken(
    rig: Rig, tab: Tab, name: str, value: str
) -> None:
    await open_page(tab, rig.url)
    await tab.click("#open-settings")
    await tab.evaluate(f"document.querySelector('#settings [name={name}]').focus()")
    await tab.type(value)
    await tab.click("#settings .primary")
    assert await tab.evaluate("document.querySelector('#settings').open") is True
    assert await tab.evaluate("document.activeElement.name") == name
    await tab.press("Escape")
    await tab.until("!document.querySelector('#settings').open")
    await ask(tab, "hi")
    await answered(tab)
    assert rig.frontend.params[-1].temperature is None


async def test_a_key_is_asked_for_and_kept_in_the_tab_alone(tab: Tab) -> None:
    options = ServeOptions(host=HOST, port=0, api_key=("secret",), strict_model=True)
    async with running_gateway(limits=PATIENT_LIMITS, options=options) as rig:
        await open_page(tab, rig.url)
        assert await tab.text("#model-name") == "needs an API key"
        await ask(tab, "hi")
        await tab.until("document.querySelector('#key-dialog').open")
        await tab.type("wrong")
        await tab.press("Enter")
        await tab.until("document.querySelector('#key-text').innerText.includes('did not take')")
        await tab.type("secret")
        await tab.press("Enter")
        await tab.until(f"{ANSWERS}[0]?.innerText.startsWith('Hello')")
        await tab.until("document.querySelector('#model-name').innerText === 'org/fake-model'")
        assert await tab.evaluate("sessionStorage.getItem('ninfer.apiKey')") == "secret"
        assert "secret" not in await tab.evaluate("JSON.stringify({...localStorage})")
        await open_page(tab, rig.url)
        assert await answered(tab) == "Hello"
        assert await tab.text("#model-name") == "org/fake-model"
    assert all("status of 401" in text for text in tab.complaints)
    tab.complaints.clear()


async def test_the_status_asks_for_a_key_until_it_has_one_or_is_refused_it(tab: Tab) -> None:
    options = ServeOptions(host=HOST, port=0, api_key=("secret",))
    async with running_gateway(limits=PATIENT_LIMITS, options=options) as rig:
        await tab.open(f"{rig.url}/#status")
        await tab.until("document.querySelector('#key-dialog').open")
        await tab.press("Escape")
        await tab.until("!document.querySelector('#key-dialog').open")
        assert await tab.text("#status-state") == "The server asks for an API key."
        await tab.click("[data-view=chat]")
        await tab.click("[data-view=status]")
        await tab.until("document.querySelector('#key-dialog').open")
        await tab.type("wrong")
        await tab.press("Enter")
        await tab.until("document.querySelector('#key-text').innerText.includes('did not take')")
        await tab.type("secret")
        await tab.press("Enter")
        await tab.until("document.querySelector('#status-state').innerText.startsWith('Ready')")
        await tab.until("!document.querySelector('#key-dialog').open")
    tab.complaints.clear()


async def test_leaving_the_key_dialog_leaves_an_error(tab: Tab) -> None:
    options = ServeOptions(host=HOST, port=0, api_key=("secret",))
    async with running_gateway(limits=PATIENT_LIMITS, options=options) as rig:
        await open_page(tab, rig.url)
        await ask(tab, "hi")
        await tab.until("document.querySelector('#key-dialog').open")
        await tab.press("Escape")
        await tab.until("!document.querySelector('#key-dialog').open")
        await answered(tab)
        assert "key" in await tab.text(".foot.error")
        assert rig.engine.handles == []
    tab.complaints.clear()


async def test_a_server_that_is_gone_is_said_to_be(tab: Tab) -> None:
    async with running_gateway(limits=PATIENT_LIMITS) as rig:
        await open_page(tab, rig.url)
    await ask(tab, "hi")
    await tab.until("document.querySelector('.foot.error')")
    assert await tab.text(".foot.error") == "The server cannot be reached."
    assert await last_text(tab) == ""
    tab.complaints.clear()


async def test_a_browser_that_keeps_nothing_can_chat(rig: Rig, tab: Tab) -> None:
    await open_page(tab, rig.url)
    await tab.evaluate("Storage.prototype.setItem = () => { throw new DOMException('full'); }")
    await ask(tab, "hi")
    assert await answered(tab) == "Hello"
    assert "no room" in await tab.text("#notice-text")


async def test_damaged_storage_is_an_empty_one(rig: Rig, tab: Tab) -> None:
    await open_page(tab, rig.url)
    for stored in ("{", "5", "null", '[{"role": "assistant"}, 7, {"role": "x"}]'):
        for name in ("conversation", "settings", "theme"):
            await tab.evaluate(f"localStorage.setItem('ninfer.{name}', {stored!r})")
        await open_page(tab, rig.url)
        await ask(tab, "hi")
        assert await answered(tab) == "Hello"
        assert len(rig.frontend.chats[-1].messages) == 1


async def test_another_tab_shows_what_was_said_here(rig: Rig, tab: Tab) -> None:
    await open_page(tab, rig.url)
    await ask(tab, "hi")
    await answered(tab)
    messages = "localStorage.getItem('ninfer.conversation')"
    kept = await tab.evaluate(messages)
    await tab.click("#new-chat")
    await tab.evaluate(f"localStorage.setItem('ninfer.conversation', {kept!r})")
    await tab.evaluate(
        "window.dispatchEvent(new StorageEvent('storage', {key: 'ninfer.conversation'}))"
    )
    assert await answered(tab) == "Hello"


async def test_a_new_chat_leads_from_the_status_to_the_chat(rig: Rig, tab: Tab) -> None:
    await tab.open(f"{rig.url}/#status")
    await tab.until("!document.querySelector('#status-view').hidden")
    await tab.click("#new-chat")
    await tab.until("!document.querySelector('#chat-view').hidden")
