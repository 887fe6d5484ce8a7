"""The embedded demo model on the CPU, asked for constrained answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ninfer.cli.loading import open_named_model
from ninfer.contract.arrays import Float32Array
from ninfer.contract.chat import (
    ChatMessage,
    ChatPrompt,
    Constraint,
    ConstraintKind,
    GenerationParams,
    TextPart,
)
from ninfer.contract.drafting import DraftCosts, DraftCounts
from ninfer.contract.errors import NInferError
from ninfer.contract.generation import (
    CallMark,
    Failed,
    Finish,
    Finished,
    GenerationRequest,
    Progress,
    Usage,
)
from ninfer.contract.model import ModelSource
from ninfer.contract.sampling import GeneratedToken
from ninfer.contract.units import Capacity
from ninfer.engine.core import Engine
from ninfer.engine.speculation.drafter import MakeDrafter
from ninfer.engine.speculation.row_drafter import RowDrafter
from ninfer.frontend.frontend import ModelFrontend
from ninfer.options import SamplingOptions
from ninfer.program.executors.cpu import CpuExecutor
from ninfer.program.executors.cpu_mtp import MtpModel
from ninfer.program.program import ModelProgram
from ninfer.program.weight_reader import read_weights

MAX_CONTEXT = 512


@dataclass(slots=True)
class GuidedAnswer:
    """All that came of one request; `calls` are (name, arguments) in order."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    tokens: list[GeneratedToken] = field(default_factory=list)
    finish: Finish | None = None
    error: NInferError | None = None
    usage: Usage = field(default_factory=lambda: Usage(0))
    drafts: DraftCounts | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


@dataclass(frozen=True, slots=True)
class GuidedModel:
    source: ModelSource
    weights: Mapping[str, Float32Array]
    frontend: ModelFrontend

    @asynccontextmanager
    async def engine(
        self,
        *,
        lanes: int = 4,
        num_pages: int = 64,
        host_blocks: int = 0,
        draft_tokens: int = 0,
        has_draft_model: bool = False,
        make_drafter: MakeDrafter = RowDrafter,
        draft_costs: DraftCosts | None = None,
    ) -> AsyncIterator[Engine]:
        capacity = Capacity(
            max_concurrency=lanes,
            max_context=MAX_CONTEXT,
            num_pages=num_pages,
            num_slots=2 * lanes + 1,
            prefill_chunk=128,
            num_host_blocks=host_blocks,
            max_draft_tokens=draft_tokens,
            has_draft_model=has_draft_model,
        )
        program = ModelProgram(self.source.config, self.executor(capacity), capacity)
        engine = Engine(
            program,
            max_pending=256,
            queue_timeout_s=600.0,
            make_drafter=make_drafter,
            draft_costs=draft_costs,
        )
        await engine.start()
        try:
            yield engine
        finally:
            await engine.aclose()

    def executor(self, capacity: Capacity) -> CpuExecutor:
        config = self.source.config
        draft_model = MtpModel(config, self.weights) if capacity.has_draft_model else None
        return CpuExecutor(config, self.weights, capacity, draft_model=draft_model, num_threads=1)

    async def request(
        self, text: str, *, thinks: bool = False, declares: tuple[Any, ...] = (), **fields: Any
    ) -> GenerationRequest:
        """A prepared request; `declares` are the tools of the prompt, `fields` GenerationParams."""
        prompt = await self.frontend.prepare_chat(
            ChatPrompt(
                messages=(ChatMessage("user", (TextPart(text),)),),
                tools=declares,
                template_kwargs={"enable_thinking": thinks},
            )
        )
        params = GenerationParams(**{"temperature": 0.0, "max_tokens": 120, "seed": 1, **fields})
        request = self.frontend.build_request("r", prompt, params, now=0.0)
        if request.prepare is not None:
            await request.prepare()
        return request


def load_guided_model(path: Path | None = None) -> GuidedModel:
    """The model at `path`; the demo model without."""
    source = open_named_model(path)
    weights = {
        name: np.array(array)
        for name, array in read_weights(source, lambda *_: None, ("text", "mtp"))
    }
    frontend = ModelFrontend(source.config, source.resources, SamplingOptions())
    return GuidedModel(source, weights, frontend.for_context(MAX_CONTEXT))


def constraint(kind: ConstraintKind, value: Any = "", *, is_strict: bool = True) -> Constraint:
    text = value if isinstance(value, str) else json.dumps(value)
    return Constraint(kind, text, "response_format", is_strict)


async def answer(
    engine: Engine, request: GenerationRequest, *, cancel_after: int | None = None
) -> GuidedAnswer:
    """All that comes of it; `cancel_after` so many tokens it is cancelled."""
    result = GuidedAnswer()
    async with engine.submit(request) as events:
        async for event in events:
            result.usage = event.usage
            if isinstance(event, Failed):
                result.error = event.error
            if isinstance(event, Finished):
                result.finish, result.drafts = event.finish, event.timings.drafts
            if isinstance(event, Progress | Finished):
                for delta in event.deltas:
                    _add(result, delta.channel, delta.text, delta.call)
                    result.tokens += delta.tokens
            if cancel_after is not None and len(result.tokens) >= cancel_after:
                events.cancel()
    return result


async def answers(engine: Engine, requests: list[GenerationRequest]) -> list[GuidedAnswer]:
    return list(await asyncio.gather(*(answer(engine, request) for request in requests)))


def _add(result: GuidedAnswer, channel: str, text: str, call: CallMark | None) -> None:
    if channel == "reasoning":
        result.reasoning += text
    elif channel == "content":
        result.content += text
    elif call is not None:
        if call.begins:
            result.calls.append([call.name, ""])
        result.calls[-1][1] += text
