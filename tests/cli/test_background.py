from __future__ import annotations

import subprocess
import sys

import pytest

from ninfer.cli.background import in_background


def _fail() -> None:
    raise ValueError("no")


def run_code(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)


async def test_results_and_errors_come_back() -> None:
    assert await in_background(lambda: 3) == 3
    with pytest.raises(ValueError, match="no"):
        await in_background(_fail)


def test_work_that_is_left_behind_does_not_keep_the_program() -> None:
    done = run_code(
        "import asyncio, time\nfrom ninfer.cli.background import in_background\n"
        "async def main():\n"
        "    await asyncio.wait_for(in_background(lambda: time.sleep(60)), 0.1)\n"
        "try: asyncio.run(main())\nexcept TimeoutError: print('left')"
    )
    assert (done.stdout, done.stderr) == ("left\n", "")


def test_an_interrupted_program_does_not_wait_for_its_pools() -> None:
    done = run_code(
        "import sys, time\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "from ninfer.cli import main\n"
        "pool = ThreadPoolExecutor()\n"
        "def interrupted(*_):\n"
        "    pool.submit(time.sleep, 60)\n"
        "    raise KeyboardInterrupt\n"
        "main._command_of = lambda _: interrupted\nsys.argv = ['ninfer']\nsys.exit(main.main())"
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
