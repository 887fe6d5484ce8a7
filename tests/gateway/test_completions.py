"""/v1/completions: kinds of prompts, choices, echo, log probabilities, streams, refusals."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer.contract.errors import NonFiniteLogits
from ninfer.contract.generation import Finish, FinishReason
from ninfer.contract.sampling import PromptScoring
from ninfer.gateway import answers, prompt_scores
from tests.helpers.fake_engine import CARD, SPECIAL_ID, fail, hold, say
from tests.helpers.gateway_rig import PATIENT_LIMITS, Answer, Rig, running_gateway, until

LENGTH = Finish(FinishReason.OUTPUT_LIMIT)
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


async def complete(rig: Rig, **fields: Any) -> Answer:
    return await rig.post("/v1/completions", {"prompt": "ab", **fields})


def choices_of(answer: Answer) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.body
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return list(choices)


def accumulated(answer: Answer) -> list[dict[str, Any]]:
    """The choices of a stream, put together as a client would."""
    choices: dict[int, dict[str, Any]] = {}
    *chunks, done = answer.events
    assert done == "[DONE]"
    for chunk in chunks:
        assert chunk["object"] == "text_completion"
        for part in chunk["choices"]:
            index, text, logprobs, reason = (
                part.pop(name) for name in ("index", "text", "logprobs", "finish_reason")
            )
            choice = choices.setdefault(
                index, {"index": index, "text": "", "logprobs": None, "finish_reason": None}
            )
            assert choice["finish_reason"] is None, "nothing comes behind the finish"
            choice["text"] += text
            choice["finish_reason"] = reason
            if logprobs is not None:
                assert set(logprobs) == set(LISTS)
                whole = choice["logprobs"] = choice["logprobs"] or {name: [] for name in LISTS}
                for name in LISTS:
                    whole[name] += logprobs[name]
            choice |= part
    return [choices[index] for index in sorted(choices)]


async def test_the_whole_answer(rig: Rig) -> None:
    rig.engine.script = say("Hel", "lo")
    answer = await complete(rig, model="gpt-3", temperature=0)
    body = answer.json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 0
    assert body.pop("timings")["prefill_s"] == 0.02
    assert body == {
        "object": "text_completion",
        "model": "gpt-3",
        "system_fingerprint": CARD.fingerprint,
        "choices": [
            {
                "index": 0,
                "text": "Hello",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": 2,
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 6,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }
    (params,) = rig.frontend.params
    assert (params.max_tokens, params.split_reasoning, params.scoring) == (16, False, None)
    assert (params.top_logprobs, params.reports_stop_token) == (None, False)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[97, 98]]),
        ("a<s>", [[97, SPECIAL_ID]]),
        (["a", "bc"], [[97], [98, 99]]),
        ([97, 299], [[97, 299]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
        (["a"] * 128, [[97]] * 128),
    ],
)
async def test_prompts_of_every_kind(rig: Rig, prompt: object, expected: list[list[int]]) -> None:
    choices = choices_of(await complete(rig, prompt=prompt))
    assert [handle.request.prompt.token_ids.tolist() for handle in rig.engine.handles] == expected
    assert len(choices) == len(expected)


async def test_choices_count_through_the_prompts(rig: Rig) -> None:
    rig.engine.script = say("x", finish=LENGTH)
    answer = await complete(rig, prompt=["a", "bb"], n=3, best_of=3, echo=True, seed=7)
    texts = [choice["text"] for choice in choices_of(answer)]
    assert texts == ["ax"] * 3 + ["bbx"] * 3
    usage = answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 12)
    seeds = [handle.request.sampling.seed for handle in rig.engine.handles]
    assert seeds[:3] == seeds[3:]
    assert len(set(seeds)) == 3
    ids = [handle.request.request_id for handle in rig.engine.handles]
    assert len(set(ids)) == 6
    assert all(own.startswith(answer.json()["id"]) for own in ids)
    first, second = rig.engine.handles[0].request, rig.engine.handles[1].request
    assert first.prompt is second.prompt, "which is how the engine knows to compute it once"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_log_probabilities_scores_the_prompt(rig: Rig, stream: bool) -> None:
    rig.engine.script = say("H", "i", finish=LENGTH)
    answer = await complete(rig, prompt="abc", echo=True, logprobs=2, max_tokens=1, stream=stream)
    (choice,) = accumulated(answer) if stream else choices_of(answer)
    assert choice["text"] == "abcHi"
    best = {"A": -0.5, "B": -1.5}
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "H", "i"],
        "token_logprobs": [None, -0.98, -0.99, -0.5, -0.5],
        "top_logprobs": [
            None,
            {**best, "b": -0.98},
            {**best, "c": -0.99},
            {"A": -0.1, "B": -9999.0, "H": -0.5},
            {"A": -0.1, "B": -9999.0, "i": -0.5},
        ],
        "text_offset": [0, 1, 2, 3, 4],
    }
    assert choice["finish_reason"] == "length"
    (handle,) = rig.engine.handles
    assert handle.request.scoring == PromptScoring(1, 2)
    assert rig.frontend.params[0].reports_stop_token


async def test_many_scores_are_written_down_off_the_loop(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"prompt": ["abc", "de"], "echo": True, "logprobs": 2}
    native = {"text": "abc", "return_logprob": True, "logprob_start_len": 0}
    expected = choices_of(await complete(rig, **fields))
    triples = (await rig.generate(**native)).json()["meta_info"]["input_token_logprobs"]
    threads: list[object] = []
    to_thread = asyncio.to_thread

    async def counted(work: Any) -> Any:
        threads.append(work)
        return await to_thread(work)

    monkeypatch.setattr(answers, "_MANY_SCORES", 0)
    monkeypatch.setattr(asyncio, "to_thread", counted)
    assert choices_of(await complete(rig, **fields)) == expected
    assert accumulated(await complete(rig, **fields, stream=True)) == expected
    for stream in (False, True):
        answer = await rig.generate(**native, stream=stream)
        whole = answer.events[-2] if stream else answer.json()
        assert whole["meta_info"]["input_token_logprobs"] == triples
    assert len(threads) == 2 + 2 + 1 + 1


async def test_scored_only(rig: Rig) -> None:
    """As evaluation harnesses ask: nothing generated."""
    rig.engine.script = say(finish=LENGTH)
    prompts = [[97, 98, 99], [100]]
    answer = await complete(rig, prompt=prompts, echo=True, logprobs=0, max_tokens=0)
    long, short = (choice["logprobs"] for choice in choices_of(answer))
    assert long["token_logprobs"] == [None, -0.98, -0.99]
    assert long["top_logprobs"] == [None, {"b": -0.98}, {"c": -0.99}]
    assert short == {
        "tokens": ["d"],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }
    assert {params.max_tokens for params in rig.frontend.params} == {0}


async def test_choices_of_a_prompt_share_its_scores(rig: Rig) -> None:
    rig.engine.script = say("x", finish=LENGTH)
    answer = await complete(rig, prompt=["ab", "cd"], n=2, echo=True, logprobs=1)
    choices = choices_of(answer)
    assert [choice["text"] for choice in choices] == ["abx", "abx", "cdx", "cdx"]
    assert choices[0]["logprobs"] == choices[1]["logprobs"]
    assert choices[3]["logprobs"]["text_offset"] == [0, 1, 2]
    scorings = [handle.request.scoring for handle in rig.engine.handles]
    assert scorings == [PromptScoring(1, 1), None] * 2


@pytest.mark.parametrize(
    ("value", "num_top"), [(True, 1), (False, None), (None, None), (0, 0), (5, 5), (20.0, 20)]
)
async def test_how_many_log_probabilities(rig: Rig, value: object, num_top: int | None) -> None:
    (choice,) = choices_of(await complete(rig, logprobs=value))
    assert rig.frontend.params[0].top_logprobs == num_top
    assert (choice["logprobs"] is None) is (num_top is None)
    assert rig.engine.handles[0].request.scoring is None, "without echo"


async def test_tokens_may_be_named_by_id(rig: Rig) -> None:
    rig.engine.script = say("H", finish=LENGTH)
    answer = await complete(
        rig, prompt=[97, 195], echo=True, logprobs=1, return_tokens_as_token_ids=True
    )
    (choice,) = choices_of(answer)
    assert choice["logprobs"]["tokens"] == ["token_id:97", "token_id:195", "token_id:72"]
    assert choice["logprobs"]["top_logprobs"][1] == {"token_id:65": -0.5, "token_id:195": -1.95}


async def test_tokens_that_are_no_text_are_written_as_bytes(rig: Rig) -> None:
    rig.engine.script = say("!", finish=LENGTH)
    answer = await complete(rig, prompt="é", echo=True, logprobs=0)
    (choice,) = choices_of(answer)
    assert choice["text"] == "é!"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]


async def test_ids_are_echoed_as_text(rig: Rig) -> None:
    rig.engine.script = say("x")
    (choice,) = choices_of(await complete(rig, prompt=[97, SPECIAL_ID, 195], echo=True))
    assert choice["text"] == "a<s>\ufffdx"


async def test_stream(rig: Rig) -> None:
    rig.engine.script = say("Hel", "lo")
    answer = await complete(rig, stream=True, n=2, echo=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    choices = accumulated(answer)
    assert [choice["text"] for choice in choices] == ["abHello"] * 2
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    *chunks, last, _ = answer.events
    assert last["timings"]["total_s"] == 0.53
    assert all("usage" not in chunk for chunk in chunks)
    whole = await complete(rig, n=2, echo=True)
    assert [choice["text"] for choice in choices_of(whole)] == ["abHello"] * 2


async def test_usage_of_a_stream(rig: Rig) -> None:
    rig.engine.script = say("Hel", "lo")
    answer = await complete(rig, stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = answer.events
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 8)
    answer = await complete(rig, stream=True, stream_options={"continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in answer.events[:-1]]
    assert counts == [3, 6, 6]
    assert (await complete(rig, stream_options={"include_usage": True})).status == 200


text_pieces = st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=5)


@settings(max_examples=40)
@given(
    prompts=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=3),
    pieces=text_pieces,
    num_choices=st.integers(1, 3),
    logprobs=st.sampled_from([None, 0, 3]),
    echo=st.booleans(),
)
async def test_streamed_and_whole_answers_agree(
    prompts: list[str], pieces: list[str], num_choices: int, logprobs: int | None, echo: bool
) -> None:
    fields = {"prompt": prompts, "n": num_choices, "logprobs": logprobs, "echo": echo}
    async with running_gateway(limits=PATIENT_LIMITS) as rig:
        rig.engine.script = say(*pieces)
        whole = choices_of(await complete(rig, **fields))
        streamed = accumulated(await complete(rig, **fields, stream=True))
    assert streamed == whole
    for choice in whole:
        prompt = prompts[choice["index"] // num_choices] if echo else ""
        assert choice["text"] == prompt + "".join(pieces)
        if logprobs is not None:
            check_lists(choice, num_given=len(prompt.encode()))


def check_lists(choice: dict[str, Any], num_given: int) -> None:
    """Equal lengths; texts stand where they are said to be, one behind another."""
    lists = choice["logprobs"]
    assert {len(lists[name]) for name in LISTS} == {len(lists["tokens"])}
    has_score = [value is not None for value in lists["token_logprobs"]]
    assert has_score == [index > 0 or num_given == 0 for index in range(len(has_score))]
    assert lists["text_offset"] == sorted(lists["text_offset"])
    for name, place, own, top in zip(
        *(lists[key] for key in ("tokens", "text_offset", "token_logprobs", "top_logprobs")),
        strict=True,
    ):
        if not name.startswith("bytes:"):
            assert choice["text"].startswith(name, place)
        assert own is None or top[name] >= own
    if choice["text"].isascii():
        assert "".join(lists["tokens"]) == choice["text"]


async def test_an_error_ends_a_stream(rig: Rig) -> None:
    rig.engine.script = fail(NonFiniteLogits("x"), "Hel")
    first, error = (await complete(rig, stream=True)).events
    assert first["choices"][0]["text"] == "Hel"
    assert error["error"]["code"] == "internal_error"
    assert (await complete(rig)).status == 500


async def test_a_client_that_leaves_ends_all_choices(rig: Rig) -> None:
    rig.engine.script = hold(asyncio.Event(), "a")
    asking = asyncio.create_task(complete(rig, prompt=["a", "b"], n=2))
    await until(lambda: rig.engine.num_open == 4)
    asking.cancel()
    await until(lambda: rig.engine.num_open == 0)
    assert all(handle.is_cancelled for handle in rig.engine.handles)


async def test_too_many_scores_for_one_answer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_scores, "MAX_SCORED", 24)
    prompts = ["abcd", "efgh"]
    assert (await complete(rig, prompt=prompts, echo=True, logprobs=2)).status == 200
    answer = await complete(rig, prompt=prompts, echo=True, logprobs=3)
    assert (answer.status, answer.error["param"]) == (400, "logprobs")
    assert len(rig.engine.handles) == 2
    fields = {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 3}
    assert (await rig.generate(text=prompts, **fields)).status == 200
    answer = await rig.generate(text=[*prompts, "x"], **{**fields, "logprob_start_len": 0})
    assert (answer.status, answer.error["param"]) == (400, "return_logprob")


async def test_fields_that_ask_for_nothing_are_no_error(rig: Rig) -> None:
    answer = await complete(
        rig,
        suffix="",
        best_of=1,
        user="me",
        logit_bias={},
        stream=None,
        echo=None,
        a_field_of_tomorrow=5,
    )
    assert answer.status == 200


async def test_limits_under_other_names(rig: Rig) -> None:
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        await complete(rig, **{name: 5})
        assert rig.frontend.params[-1].max_tokens == 5
    await complete(rig, max_tokens=-1)
    assert rig.frontend.params[-1].max_tokens is None


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": None}, "missing_required_parameter", "prompt"),
        ({"prompt": 5}, "invalid_type", "prompt"),
        ({"prompt": {}}, "invalid_type", "prompt"),
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": "", "echo": True}, "invalid_value", "prompt"),
        ({"prompt": []}, "invalid_value", "prompt"),
        ({"prompt": ["a", ""]}, "invalid_value", "prompt[1]"),
        ({"prompt": ["a", 5]}, "invalid_type", "prompt[1]"),
        ({"prompt": [1, "a"]}, "invalid_type", "prompt[1]"),
        ({"prompt": [1, 300]}, "invalid_value", "prompt[1]"),
        ({"prompt": [1, True]}, "invalid_type", "prompt[1]"),
        ({"prompt": [[1], []]}, "invalid_value", "prompt[1]"),
        ({"prompt": [[1], [2, -1]]}, "invalid_value", "prompt[1][1]"),
        ({"prompt": ["a"] * 129}, "invalid_value", "prompt"),
        ({"prompt": ["a", "x" * 65]}, "context_length_exceeded", "prompt[1]"),
        ({"logprobs": 21}, "invalid_value", "logprobs"),
        ({"logprobs": -1}, "invalid_value", "logprobs"),
        ({"logprobs": "1"}, "invalid_type", "logprobs"),
        ({"echo": 1}, "invalid_type", "echo"),
        ({"suffix": "b"}, "unsupported_parameter", "suffix"),
        ({"best_of": 2}, "invalid_value", "best_of"),
        ({"n": 17}, "invalid_value", "n"),
        ({"max_tokens": -2}, "invalid_value", "max_tokens"),
        ({"stream_options": []}, "invalid_type", "stream_options"),
        ({"use_beam_search": True}, "unsupported_parameter", "use_beam_search"),
        ({"prompt_logprobs": 1}, "unsupported_parameter", "prompt_logprobs"),
    ],
)
async def test_refusals_name_the_field(
    rig: Rig, fields: dict[str, Any], code: str, param: str
) -> None:
    answer = await complete(rig, **fields)
    assert answer.status == 400
    assert (answer.error["code"], answer.error["param"]) == (code, param)
    assert rig.engine.handles == []
