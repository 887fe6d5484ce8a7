"""Schemas of answers and errors: what is surely in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ninfer.contract.generation import EngineHealth
from ninfer.gateway.openapi.schema import (
    Schema,
    answer,
    any_object,
    array,
    boolean,
    integer,
    nullable,
    one_of,
    ref,
    string,
)

OPENAI_ERROR: Final = "Error"
ANTHROPIC_ERROR: Final = "AnthropicError"
_COUNT: Final = integer(0)
_STATUS: Final = string(*(health.value for health in EngineHealth))
_USAGE: Final = answer(
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=answer(cached_tokens=_COUNT),
    completion_tokens_details=answer(reasoning_tokens=_COUNT),
)
_NATIVE: Final = answer(
    text=string(),
    output_ids=array(_COUNT),
    meta_info=answer(
        id=string(),
        finish_reason=nullable(any_object()),
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        cached_tokens=_COUNT,
    ),
)
ANSWERS: Final[Mapping[str, Schema]] = {
    OPENAI_ERROR: answer(
        error=answer(
            message=string(),
            type=string(),
            param=nullable(string()),
            code=nullable(string()),
        )
    ),
    ANTHROPIC_ERROR: answer(
        type=string("error"), error=answer(type=string(), message=string()), request_id=string()
    ),
    "Event": answer(data=string(about="JSON, or [DONE].")),
    "Index": answer(name=string(), version=string()),
    "Health": answer(status=_STATUS),
    "Live": answer(status=string("ok")),
    "Version": answer(version=string()),
    "Status": answer(status=_STATUS, version=string(), model=any_object(), http=any_object()),
    "Load": answer(status=_STATUS, server_load=_COUNT, num_reqs=_COUNT),
    "ServerInfo": answer(
        version=string(),
        status=_STATUS,
        model=any_object(),
        is_protected=boolean(),
        options=any_object(),
    ),
    "Done": answer(status=string("ok")),
    "Aborted": answer(status=string("ok"), aborted=_COUNT),
    "Model": answer(
        id=string(),
        object=string("model"),
        created=_COUNT,
        owned_by=string(),
        max_model_len=_COUNT,
        type=string("model"),
        display_name=string(),
        created_at=string(),
    ),
    "ModelList": answer(
        object=string("list"), data=array(ref("Model")), has_more=boolean(),
        first_id=string(), last_id=string(),
    ),
    "ChatCompletion": answer(
        id=string(),
        object=string("chat.completion"),
        created=_COUNT,
        model=string(),
        choices=array(
            answer(index=_COUNT, message=any_object(), finish_reason=string()), shortest=1
        ),
        usage=_USAGE,
    ),
    "Completion": answer(
        id=string(),
        object=string("text_completion"),
        created=_COUNT,
        model=string(),
        choices=array(answer(index=_COUNT, text=string(), finish_reason=string()), shortest=1),
        usage=_USAGE,
    ),
    "Message": answer(
        id=string(),
        type=string("message"),
        role=string("assistant"),
        model=string(),
        content=array(any_object()),
        stop_reason=nullable(string()),
        stop_sequence=nullable(string()),
        usage=answer(input_tokens=_COUNT, output_tokens=_COUNT),
    ),
    "MessageTokens": answer(input_tokens=_COUNT),
    "Response": answer(
        id=string(),
        object=string("response"),
        created_at=_COUNT,
        status=string(),
        model=string(),
        output=array(any_object()),
        usage=nullable(any_object()),
    ),
    "ResponseTokens": answer(object=string("response.input_tokens"), input_tokens=_COUNT),
    "ResponseDeleted": answer(
        id=string(), object=string("response.deleted"), deleted=boolean()
    ),
    "ItemList": answer(
        object=string("list"), data=array(any_object()), has_more=boolean(),
        first_id=nullable(string()), last_id=nullable(string()),
    ),
    "Generated": one_of(_NATIVE, array(_NATIVE)),
    "Tokens": answer(
        tokens=array(one_of(_COUNT, any_object())), count=_COUNT, max_model_len=_COUNT
    ),
    "Text": answer(prompt=string(), content=string()),
    "Rendered": answer(prompt=string()),
    "OpenApi": answer(openapi=string(), info=any_object(), paths=any_object()),
}  # fmt: skip
