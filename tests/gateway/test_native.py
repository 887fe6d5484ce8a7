"""/generate: single, batch, several choices, streams and logprobs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ninfer.contract.errors import NonFiniteLogits, RequestError
from ninfer.contract.generation import Finish, FinishReason
from ninfer.contract.sampling import PromptScoring
from tests.helpers.fake_engine import CARD, fail, hold, say
from tests.helpers.gateway_rig import Rig

HELLO_IDS = list(b"Hello")


async def test_text_in_text_out(rig: Rig) -> None:
    rig.engine.script = say("Hel", "lo")
    answer = await rig.generate(text="abc")
    body = answer.json()
    meta = body.pop("meta_info")
    assert body == {"text": "Hello", "output_ids": HELLO_IDS}
    assert meta["finish_reason"] == {"type": "stop", "matched": 2}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 6, 0)
    assert meta["e2e_latency"] >= 0
    assert meta["timings"]["prefill_s"] == 0.02
    assert meta["id"] == rig.engine.handles[0].request_id
    assert "output_token_logprobs" not in meta
    assert not rig.frontend.params[0].split_reasoning
    assert rig.frontend.params[0].max_tokens == 128


async def test_ids_in(rig: Rig) -> None:
    rig.engine.script = say("x", finish=Finish(FinishReason.OUTPUT_LIMIT))
    answer = await rig.generate(input_ids=[1, 2, 3, 299], rid="mine")
    assert answer.json()["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    assert answer.json()["meta_info"]["id"] == "mine"
    assert rig.engine.handles[0].request.prompt.token_ids.tolist() == [1, 2, 3, 299]
    assert rig.engine.handles[0].request_id != "mine"


async def test_batch_answers_in_order(rig: Rig) -> None:
    answer = await rig.generate(text=["a", "bb", "ccc"], rid=["x", "y", "z"])
    metas = [item["meta_info"] for item in answer.json()]
    assert [(meta["id"], meta["prompt_tokens"]) for meta in metas] == [("x", 1), ("y", 2), ("z", 3)]
    assert len((await rig.generate(input_ids=[[1], [2]])).json()) == 2
    assert len((await rig.generate(input_ids=[[1]])).json()) == 1


async def test_choices_of_a_prompt_are_a_list(rig: Rig) -> None:
    answer = await rig.generate(text="a", sampling_params={"n": 3, "sampling_seed": 5})
    assert len(answer.json()) == 3
    seeds = [handle.request.sampling.seed for handle in rig.engine.handles]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3


async def test_sampling_params(rig: Rig) -> None:
    await rig.generate(
        text="a",
        sampling_params={
            "max_new_tokens": 7,
            "min_new_tokens": 2,
            "temperature": 0,
            "stop": "END",
            "stop_token_ids": [9],
            "ignore_eos": True,
            "skip_special_tokens": False,
            "logit_bias": {"4": 1},
            "no_stop_trim": True,
        },
    )
    params = rig.frontend.params[0]
    assert (params.max_tokens, params.min_tokens, params.temperature) == (7, 2, 0.0)
    assert (params.stop, params.stop_token_ids) == (("END",), (9,))
    assert params.ignore_eos
    assert params.include_stop_string
    assert not params.skip_special_tokens
    assert params.logit_bias == ((4, 1.0),)


async def test_logprobs_are_triples(rig: Rig) -> None:
    rig.engine.script = say("hi")
    fields = {"text": "a", "return_logprob": True, "top_logprobs_num": 2}
    meta = (await rig.generate(**fields)).json()["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 104, None], [-0.5, 105, None]]
    assert meta["output_top_logprobs"] == [[[-0.1, 65, None], [-9999.0, 66, None]]] * 2
    with_text = (await rig.generate(**fields, return_text_in_logprobs=True)).json()["meta_info"]
    assert with_text["output_token_logprobs"][0] == [-0.5, 104, "h"]


async def test_stream_is_cumulative(rig: Rig) -> None:
    rig.engine.script = say("Hel", "l", "o")
    answer = await rig.generate(text="abc", stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done = answer.events
    assert done == "[DONE]"
    assert [event["text"] for event in events] == ["Hel", "Hell", "Hello"]
    assert events[-1]["output_ids"] == HELLO_IDS
    reasons = [event["meta_info"]["finish_reason"] for event in events]
    assert reasons == [None, None, {"type": "stop", "matched": 2}]
    assert "index" not in events[0]


async def test_incremental_stream_joins_to_the_whole(rig: Rig) -> None:
    rig.engine.script = say("Hel", "l", "o")
    answer = await rig.generate(text="abc", stream=True, incremental=True, return_logprob=True)
    events = answer.events[:-1]
    assert [event["text"] for event in events] == ["Hel", "l", "o"]
    assert [token for event in events for token in event["output_ids"]] == HELLO_IDS
    counts = [len(event["meta_info"]["output_token_logprobs"]) for event in events]
    assert counts == [3, 1, 1]


async def test_streamed_batch_frames_carry_their_index(rig: Rig) -> None:
    rig.engine.script = say("Hel", "lo")
    events = (await rig.generate(text=["a", "b"], stream=True)).events[:-1]
    last = {event["index"]: event["text"] for event in events}
    assert last == {0: "Hello", 1: "Hello"}


async def test_failure_in_a_stream(rig: Rig) -> None:
    rig.engine.script = fail(NonFiniteLogits("x"), "a")
    events = (await rig.generate(text="abc", stream=True)).events
    assert events[0]["text"] == "a"
    assert events[-1]["error"]["code"] == "internal_error"


async def test_one_failed_prompt_fails_the_batch_and_frees_the_rest(rig: Rig) -> None:
    gate = asyncio.Event()
    scripts = iter([hold(gate, "a"), fail(NonFiniteLogits("x"))])
    rig.engine.script = lambda request: next(scripts)(request)
    assert (await rig.generate(text=["a", "b"])).status == 500
    assert rig.engine.num_open == 0


async def test_model_without_a_tokenizer_takes_ids_alone(rig: Rig) -> None:
    rig.frontend.error = RequestError("tokenizer_unavailable", "The model has no tokenizer.")
    answer = await rig.generate(text="a")
    assert (answer.status, answer.error["code"]) == (400, "tokenizer_unavailable")
    assert (await rig.generate(input_ids=[1])).status == 200


@pytest.mark.parametrize("length", [64, 65])
@pytest.mark.parametrize("name", ["text", "input_ids"])
async def test_too_long_a_prompt_names_its_field(rig: Rig, name: str, length: int) -> None:
    value: Any = "x" * length if name == "text" else [1] * length
    other: Any = "a" if name == "text" else [1]
    for given, param in ((value, name), ([other, value], f"{name}[1]")):
        answer = await rig.generate(**{name: given})
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert answer.error["param"] == param
        limit = min(length - 1, CARD.max_context)
        assert f"{length} tokens > {limit} maximum" in answer.error["message"]
        assert "messages" not in answer.error["message"]
        assert rig.engine.num_open == 0


async def test_a_prompt_may_fill_the_context_when_no_output_is_asked_for(rig: Rig) -> None:
    answer = await rig.generate(text="x" * 64, sampling_params={"max_new_tokens": 0})
    assert answer.status == 200


async def test_a_bad_prompt_is_found_before_any_other_is_submitted(rig: Rig) -> None:
    assert (await rig.generate(text=["a", "x" * 65])).status == 400
    assert rig.engine.handles == []


async def test_every_prompt_may_have_its_own_sampling_params(rig: Rig) -> None:
    answer = await rig.generate(
        text=["a", "b", "c"],
        sampling_params=[{"temperature": 0, "max_new_tokens": 3}, None, {"temperature": 1.5}],
        return_logprob=True,
    )
    assert len(answer.json()) == 3
    given = [(params.temperature, params.max_tokens) for params in rig.frontend.params]
    assert given == [(0.0, 3), (None, 128), (1.5, 128)]
    assert {params.top_logprobs for params in rig.frontend.params} == {0}
    assert (await rig.generate(text="a", sampling_params=[{"max_new_tokens": 4}])).status == 200
    assert rig.frontend.params[-1].max_tokens == 4


def scored(token_id: int, text: str | None = None) -> list[Any]:
    return [token_id / -100, token_id, text]


async def test_prompts_are_scored_from_a_token_on(rig: Rig) -> None:
    rig.engine.script = say("Hi")
    answer = await rig.generate(
        text="abcd",
        return_logprob=True,
        logprob_start_len=1,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
        sampling_params={"n": 2},
    )
    for item in answer.json():
        meta = item["meta_info"]
        assert meta["input_token_logprobs"] == [[None, 98, "b"], scored(99, "c"), scored(100, "d")]
        tops = [[-0.5, 65, "A"], [-1.5, 66, "B"]]
        assert meta["input_top_logprobs"] == [None, tops, tops]
        assert len(meta["output_token_logprobs"]) == 2
    scorings = [handle.request.scoring for handle in rig.engine.handles]
    assert scorings == [PromptScoring(2, 2), None], "choices of one prompt share its scores"


@pytest.mark.parametrize("incremental", [False, True])
async def test_scores_come_with_the_end_of_every_streamed_choice(
    rig: Rig, incremental: bool
) -> None:
    rig.engine.script = say("H", "i")
    answer = await rig.generate(
        text="abc",
        return_logprob=True,
        logprob_start_len=0,
        stream=True,
        incremental=incremental,
        sampling_params={"n": 2},
    )
    *frames, done = answer.events
    assert done == "[DONE]"
    ends = [frame["meta_info"] for frame in frames if frame["meta_info"]["finish_reason"]]
    assert len(ends) == 2
    for meta in ends:
        assert meta["input_token_logprobs"] == [[None, 97, None], scored(98), scored(99)]
        assert meta["input_top_logprobs"] == [None, [], []]
    others = [frame["meta_info"] for frame in frames if not frame["meta_info"]["finish_reason"]]
    assert others
    assert not any("input_token_logprobs" in meta for meta in others)


@pytest.mark.parametrize("start", [None, -1])
async def test_prompts_are_not_scored_unless_asked_for(rig: Rig, start: int | None) -> None:
    answer = await rig.generate(text="abc", return_logprob=True, logprob_start_len=start)
    assert "input_token_logprobs" not in answer.json()["meta_info"]
    assert rig.engine.handles[0].request.scoring is None
    plain = await rig.generate(text="abc", logprob_start_len=0)
    assert "input_token_logprobs" not in plain.json()["meta_info"]


async def test_fields_that_ask_for_nothing_are_no_error(rig: Rig) -> None:
    answer = await rig.generate(
        text="a",
        sampling_params={"stop_regex": "", "custom_params": {}, "regex": None, "typical_p": 1.0},
        lora_path=None,
        session_params=None,
        return_hidden_states=False,
        token_ids_logprob=None,
        temperature=None,
        a_field_of_tomorrow=5,
    )
    assert answer.status == 200


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({}, "missing_required_parameter", "text"),
        ({"text": "a", "input_ids": [1]}, "invalid_value", "input_ids"),
        ({"text": ""}, "invalid_value", "text"),
        ({"text": 5}, "invalid_type", "text"),
        ({"text": []}, "invalid_value", "text"),
        ({"text": ["a", 5]}, "invalid_type", "text[1]"),
        ({"text": ["a"] * 129}, "invalid_value", "text"),
        ({"input_ids": []}, "invalid_value", "input_ids"),
        ({"input_ids": "1"}, "invalid_type", "input_ids"),
        ({"input_ids": [1, 300]}, "invalid_value", "input_ids[1]"),
        ({"input_ids": [-1]}, "invalid_value", "input_ids[0]"),
        ({"input_ids": [True]}, "invalid_type", "input_ids[0]"),
        ({"input_ids": [[1], []]}, "invalid_value", "input_ids[1]"),
        ({"input_ids": [[1], 2]}, "invalid_type", "input_ids[1]"),
        ({"input_ids": [1, [2]]}, "invalid_type", "input_ids[1]"),
        ({"text": "a", "sampling_params": 5}, "invalid_type", "sampling_params"),
        ({"text": "a", "sampling_params": []}, "invalid_value", "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "invalid_value", "sampling_params"),
        ({"text": ["a"], "sampling_params": [5]}, "invalid_type", "sampling_params[0]"),
        (
            {"text": ["a", "b"], "sampling_params": [{}, {"top_p": 2}]},
            "invalid_value",
            "sampling_params[1].top_p",
        ),
        (
            {"text": ["a", "b"], "sampling_params": [{"n": 2}, None]},
            "invalid_value",
            "sampling_params[1].n",
        ),
        ({"text": "a", "lora_path": "x"}, "unsupported_parameter", "lora_path"),
        ({"text": "a", "lora_path": ""}, "unsupported_parameter", "lora_path"),
        ({"text": "a", "session_params": {"id": "s"}}, "unsupported_parameter", "session_params"),
        (
            {"text": "a", "return_hidden_states": True},
            "unsupported_parameter",
            "return_hidden_states",
        ),
        ({"text": "a", "token_ids_logprob": [5]}, "unsupported_parameter", "token_ids_logprob"),
        (
            {"text": "a", "sampling_params": {"stop_regex": "a"}},
            "unsupported_parameter",
            "sampling_params.stop_regex",
        ),
        ({"text": "a", "max_new_tokens": 5}, "unsupported_parameter", "max_new_tokens"),
        ({"text": "a", "temperature": 0}, "unsupported_parameter", "temperature"),
        ({"text": "a", "sampling_params": {"n": 99}}, "invalid_value", "sampling_params.n"),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": -2}},
            "invalid_value",
            "sampling_params.max_new_tokens",
        ),
        (
            {"text": "a", "regex": "a"},
            "unsupported_parameter",
            "regex",
        ),
        ({"text": "a", "image_data": "x"}, "unsupported_value", "image_data"),
        (
            {"text": "a", "return_logprob": True, "top_logprobs_num": 21},
            "invalid_value",
            "top_logprobs_num",
        ),
        (
            {"text": "a", "return_logprob": True, "logprob_start_len": 1},
            "invalid_value",
            "logprob_start_len",
        ),
        ({"text": "a", "logprob_start_len": -2}, "invalid_value", "logprob_start_len"),
        ({"text": "a", "logprob_start_len": "0"}, "invalid_type", "logprob_start_len"),
        ({"text": "a", "top_logprobs_num": 2}, "invalid_value", "top_logprobs_num"),
        ({"text": "a", "rid": 5}, "invalid_type", "rid"),
        ({"text": ["a"], "rid": ["x", "y"]}, "invalid_value", "rid"),
        ({"text": ["a", "b", "c"], "rid": ["x", "y", "x"]}, "invalid_value", "rid[2]"),
        *(
            (
                {"text": "a", "sampling_params": {first: 3, second: "x"}},
                "invalid_type",
                f"sampling_params.{second}",
            )
            for first, second in (
                ("max_new_tokens", "max_tokens"),
                ("max_new_tokens", "max_completion_tokens"),
                ("max_new_tokens", "max_output_tokens"),
                ("min_new_tokens", "min_tokens"),
                ("seed", "sampling_seed"),
            )
        ),
        (
            {
                "text": "a",
                "sampling_params": {"include_stop_str_in_output": True, "no_stop_trim": 1},
            },
            "invalid_type",
            "sampling_params.no_stop_trim",
        ),
    ],
)
async def test_refusals_name_the_field(
    rig: Rig, fields: dict[str, Any], code: str, param: str
) -> None:
    answer = await rig.generate(**fields)
    assert answer.status == 400
    assert (answer.error["code"], answer.error["param"]) == (code, param)
