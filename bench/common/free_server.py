"""`ninfer serve` over a device that takes no time: the demo model's frontend, no weights.

    python -m bench.common.free_server [--lanes 64] [--step-ms 0] [--port 0] [--profile FILE]

Says where it serves, and ends with SIGINT or SIGTERM. --profile writes what cProfile saw.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import time
from contextlib import nullcontext
from typing import Any, Final

from bench.common.free_executor import FreeExecutor
from ninfer.cli.loading import open_named_model
from ninfer.contract.model import ModelCard
from ninfer.contract.units import PAGE_TOKENS, Capacity
from ninfer.engine.core import Engine
from ninfer.frontend.frontend import ModelFrontend
from ninfer.gateway.app import Gateway
from ninfer.gateway.lifecycle import ServedModel
from ninfer.gateway.server import serve
from ninfer.options import SamplingOptions, ServeOptions
from ninfer.program.program import ModelProgram

SENTENCE: Final = "The little penguin walked over the ice and looked at the deep water. "
_CONTEXT: Final = 2048


async def _load(lanes: int, step_s: float) -> ServedModel:
    source = open_named_model(None)
    frontend = ModelFrontend(source.config, source.resources, SamplingOptions())
    capacity = Capacity(lanes, _CONTEXT, lanes * _CONTEXT // PAGE_TOKENS, 2 * lanes + 1, 256)
    text = (await frontend.prepare_text(SENTENCE)).token_ids.tolist()
    program = ModelProgram(source.config, FreeExecutor(capacity, text, step_s), capacity)
    engine = Engine(program, max_pending=4 * lanes, queue_timeout_s=120.0)
    await engine.start()
    card = ModelCard(
        source.name, source.config.architecture, _CONTEXT, int(time.time()), "fp_bench"
    )
    return ServedModel(engine, frontend.for_context(_CONTEXT), card)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--profile")
    arguments = parser.parse_args()
    options = ServeOptions(port=arguments.port, drain_grace=0.0, drain_timeout=0.0)
    card = ModelCard("free", "", _CONTEXT, 0, "")
    profile: Any = nullcontext() if arguments.profile is None else cProfile.Profile()
    with profile:
        asyncio.run(
            serve(
                Gateway(options, card),
                lambda: _load(arguments.lanes, arguments.step_ms / 1000.0),
                on_ready=lambda url: print(f"serving at {url}", flush=True),
            )
        )
    if arguments.profile is not None:
        profile.dump_stats(arguments.profile)


if __name__ == "__main__":
    main()
