"""Rendering with the checkpoint's own template, whatever clients send."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.chat import ChatMessage, ChatPrompt
from ninfer.contract.errors import RequestError
from ninfer.frontend.chat_renderer import ChatRenderer
from ninfer.frontend.template import ChatTemplate
from tests.helpers.chat_templates import ALTERNATING, QWEN3, QWEN3_5
from tests.helpers.demo_frontend import call, chat, demo_tokenizer, turn
from tests.helpers.model_paths import DEMO_MODEL

TOKENIZER = demo_tokenizer()
DEMO = (DEMO_MODEL / "chat_template.jinja").read_text()
SOURCES = {"demo": DEMO, "qwen3": QWEN3, "qwen3_5": QWEN3_5}
RENDERERS = {
    name: ChatRenderer(ChatTemplate(source), TOKENIZER.control_texts)
    for name, source in SOURCES.items()
}
BARE = {name: ChatTemplate(source) for name, source in SOURCES.items()}
ALL = pytest.mark.parametrize("name", SOURCES)
STRICT = pytest.mark.parametrize("name", ["demo", "qwen3_5"])


def render(name: str, prompt: ChatPrompt) -> str:
    return RENDERERS[name].render(prompt).plain


def block(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def history(*messages: ChatMessage) -> ChatPrompt:
    return chat(*messages, add_generation_prompt=False)


@ALL
def test_ordinary_conversation_is_what_the_template_makes_of_it(name: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "<b> & 'é'"}}]
    expected = BARE[name].render(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Bye"},
        ],
        tools=tools,
        add_generation_prompt=True,
    )
    prompt = chat(
        turn("system", "Be brief."),
        turn("user", "Hi"),
        turn("assistant", "Yes?"),
        turn("user", "Bye"),
        tools=tuple(tools),
    )
    rendered = RENDERERS[name].render(prompt)
    assert (rendered.text, rendered.guard) == (expected, None)
    assert '"description": "<b> & \'é\'"' in rendered.text


@ALL
def test_late_system_message_is_a_system_block_in_place(name: str) -> None:
    first = (turn("user", "A"), turn("assistant", "B"))
    text = render(name, history(*first, turn("system", "C"), turn("user", "D")))
    assert text == block("user", "A") + block("assistant", "B") + block("system", "C") + block(
        "user", "D"
    )


@ALL
def test_late_system_messages_keep_earlier_turns_as_they_were(name: str) -> None:
    turns = [
        turn("system", "head"),
        turn("user", "A"),
        turn("assistant", "", reasoning_content="why", tool_calls=(call("f", {"x": 1}),)),
        turn("tool", "result"),
        turn("developer", "note"),
        turn("developer", "another"),
        turn("assistant", "B"),
        turn("system", "last"),
    ]
    for length in range(4, len(turns)):
        shorter = render(name, history(*turns[:length]))
        # An assistant turn that is the last one keeps its thought in some templates.
        if turns[length - 1].role != "assistant":
            assert render(name, history(*turns[: length + 1])).startswith(shorter)
    text = render(name, history(*turns))
    assert block("system", "note") + block("system", "another") in text
    assert text.endswith(block("system", "last"))
    assert "why" in text


@STRICT
def test_late_system_message_does_not_drop_thoughts_of_the_present_turn(name: str) -> None:
    turns = [turn("user", "A"), turn("assistant", "B", reasoning_content="why")]
    text = render(name, history(*turns, turn("system", "C")))
    assert text == block("user", "A") + block("assistant", "<think>\nwhy\n</think>\n\nB") + block(
        "system", "C"
    )


@ALL
@pytest.mark.parametrize(
    "messages",
    [
        (turn("system", "S"),),
        (turn("assistant", "A"),),
        (turn("system", "S"), turn("assistant", "A")),
        (turn("assistant", "A"), turn("system", "S")),
        (turn("user", "A"), turn("user", "B")),
        (turn("user", "A"), turn("assistant", "B"), turn("assistant", "C")),
        (turn("user"), turn("assistant"), turn("system"), turn("user")),
        (turn("system"),),
        (turn("user", "A"), turn("assistant", tool_calls=(call("f", ""),)), turn("tool")),
        (turn("system", "S"), turn("tool", "T")),
        (turn("user", "<tool_response>x</tool_response>"),),
    ],
)
def test_every_order_of_turns_is_rendered(name: str, messages: tuple[ChatMessage, ...]) -> None:
    text = render(name, chat(*messages))
    for message in messages:
        assert message.text in text
    assert "<|im_start|>assistant\n" in text
    assert all(ord(letter) < 0xE000 for letter in text)


@STRICT
def test_conversation_without_a_user_has_no_user_block(name: str) -> None:
    text = render(name, history(turn("system", "S"), turn("assistant", "A")))
    assert text == block("system", "S") + block("assistant", "<think>\n\n</think>\n\nA")


ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool"])


@given(st.lists(st.tuples(ROLES, st.sampled_from(["", "x", "<|im_end|>", "<think>"])), min_size=1))
def test_no_order_of_turns_is_refused(turns: list[tuple[str, str]]) -> None:
    for name in SOURCES:
        render(name, chat(*(turn(role, text) for role, text in turns)))  # type: ignore[arg-type]


def test_tool_call_arguments_reach_xml_templates_as_parameters() -> None:
    def rendered(arguments: str) -> str:
        turns = (turn("assistant", tool_calls=(call("weather", arguments),)), turn("tool", "7"))
        return render("qwen3_5", chat(turn("user", "q"), *turns, turn("user", "r")))

    assert "<parameter=city>\nOslo\n</parameter>" in rendered('{"city":"Oslo"}')
    assert "<parameter=arguments>\nnot json\n</parameter>" in rendered("not json")
    assert "<parameter=arguments>\n[1]\n</parameter>" in rendered("[1]")


def test_tool_results_merge_into_one_turn() -> None:
    calls = (call("f", {}), call("g", {}))
    turns = (turn("user", "q"), turn("assistant", tool_calls=calls), turn("tool", "1"))
    text = render("qwen3", history(*turns, turn("tool", "2")))
    responses = "\n".join(f"<tool_response>\n{n}\n</tool_response>" for n in (1, 2))
    assert text.endswith(block("user", responses))


@ALL
def test_inline_thought_of_history_is_its_reasoning(name: str) -> None:
    inline = turn("assistant", "<think>\nwhy\n</think>\n\nB")
    given_apart = turn("assistant", "B", reasoning_content="why")
    for later in ((), (turn("user", "C"),)):
        texts = [render(name, history(turn("user", "A"), m, *later)) for m in (inline, given_apart)]
        assert texts[0] == texts[1]


@ALL
def test_last_assistant_turn_is_left_open_on_request(name: str) -> None:
    turns = (turn("user", "A"), turn("assistant", "  Once upon "))
    text = render(name, chat(*turns, continue_final_message=True))
    assert text.endswith("Once upon ")


@ALL
def test_open_thought_is_continued(name: str) -> None:
    turns = (turn("user", "A"), turn("assistant", "<think>\nLet me"))
    text = render(name, chat(*turns, continue_final_message=True))
    assert text.endswith("<|im_start|>assistant\n<think>\nLet me")


@pytest.mark.parametrize(
    "last", [turn("user", "A"), turn("assistant", "B", tool_calls=(call("f", {}),))]
)
def test_what_cannot_be_continued_is_an_invalid_prompt(last: ChatMessage) -> None:
    with pytest.raises(RequestError, match="continued") as caught:
        render("demo", chat(turn("user", "A"), last, continue_final_message=True))
    assert caught.value.code == "invalid_prompt"


def test_alternating_template_gets_neighbours_joined() -> None:
    renderer = ChatRenderer(ChatTemplate(ALTERNATING, {"bos_token": "<s>"}), ())
    text = renderer.render(chat(turn("user", "A"), turn("user", "B"))).plain
    assert text == "<s>[user]A\n\nB[/user][assistant]"


def test_refusal_of_the_template_reaches_the_client() -> None:
    renderer = ChatRenderer(ChatTemplate(ALTERNATING), ())
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        renderer.render(chat(turn("assistant", "A")))
    assert caught.value.code == "invalid_template"


def test_template_that_drops_a_turn_is_not_continued_silently() -> None:
    renderer = ChatRenderer(ChatTemplate("fixed text"), ())
    with pytest.raises(RequestError, match="does not render"):
        renderer.render(chat(turn("assistant", "A"), continue_final_message=True))


def test_late_system_block_follows_the_frame_of_the_head_even_with_a_bos_mark() -> None:
    source = (
        "{{- bos_token }}{%- for m in messages %}"
        "{%- if m.role == 'system' and not loop.first %}{{- raise_exception('late') }}{%- endif %}"
        "{{- '[' + m.role + ']\\n' + m.content + '[end]\\n' }}{%- endfor %}"
    )
    renderer = ChatRenderer(ChatTemplate(source, {"bos_token": "<s>"}), ())
    text = renderer.render(history(turn("user", "A"), turn("system", "B"), turn("user", "C"))).plain
    assert text == "<s>[user]\nA[end]\n[system]\nB[end]\n[user]\nC[end]\n"


def test_marks_survive_a_template_that_escapes_json() -> None:
    source = "{{ messages[0].content|tojson(ensure_ascii=true) }}"
    rendered = ChatRenderer(ChatTemplate(source), TOKENIZER.control_texts).render(
        chat(turn("user", "é<|im_end|>"))
    )
    assert rendered.plain == '"\\u00e9<|im_end|>"'
    assert "<|im_end|>" not in rendered.text


def test_too_deep_tools_are_an_invalid_prompt() -> None:
    deep: dict[str, object] = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(RequestError, match="nested too deeply"):
        render("demo", chat(turn("user", "A"), tools=(deep,)))
