"""A crowd of clients against a served model: latencies, and whether the server keeps anything.

    python -m bench.bench_http_load [--model PATH] [--clients 200] [--seconds 60] [--json OUT.json]

All protocols, with clients that leave, read slowly or send nonsense (bench/common/load_clients.py);
every answer is compared with the one its question has alone, a wrong one ends the run. Memory and
open files of the server are read after a first third of the time and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any

import aiohttp

from bench.bench_http import served
from bench.common.load_clients import Report, right_answers, run_crowd
from bench.common.record import host, write_record

_IDLE_TRIES = 600


async def measure(model: str | None, clients: int, seconds: float) -> dict[str, Any]:
    command = ["-m", "ninfer", "serve", *([model] if model else [])]
    command += ["--queue-timeout", "3600", "--max-pending", str(max(1, clients * 4 // 5))]
    load = os.getloadavg()[0]
    async with served(*command) as (url, process_id, _):
        answers = await right_answers(url)
        await run_crowd(url, clients, seconds / 3, answers, Report())
        await _wait_until_idle(url)
        before, report = _holdings(process_id), Report()
        await run_crowd(url, clients, seconds * 2 / 3, answers, report, seed=clients)
        await _wait_until_idle(url)
        after = _holdings(process_id)
    for line in report.lines():
        print(line)
    print(f"server, warm and at the end: {before} {after}; load before {load:.2f}")
    return {
        "clients": clients,
        "seconds": seconds,
        "load": load,
        "outcomes": dict(report.outcomes),
        "server_warm": before,
        "server_end": after,
        "rows": report.rows(),
    }


async def _wait_until_idle(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(_IDLE_TRIES):
            async with session.get(f"{url}/v1/load") as response:
                if (await response.json())["server_load"] == 0:
                    return
            await asyncio.sleep(0.1)
    raise RuntimeError("the server does not become idle")


def _holdings(process_id: int) -> dict[str, int]:
    """Resident memory and open files of a process."""
    pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    return {
        "resident_mib": pages * os.sysconf("SC_PAGE_SIZE") // 2**20,
        "files": len(list(Path(f"/proc/{process_id}/fd").iterdir())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.model, arguments.clients, arguments.seconds))
    if arguments.json is not None:
        write_record(arguments.json, {**host(), **figures})


if __name__ == "__main__":
    main()
