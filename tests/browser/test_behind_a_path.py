"""The page under a path of its own, as a proxy may put it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from tests.helpers.chat_page import answered, ask, open_page
from tests.helpers.chromium import Tab
from tests.helpers.gateway_rig import HOST, Rig

PATH = "/ai/model"


@asynccontextmanager
async def proxy_to(url: str) -> AsyncIterator[str]:
    """The URL of a server that strips PATH and knows nothing else."""
    async with aiohttp.ClientSession() as client:

        async def pass_on(request: web.BaseRequest) -> web.Response:
            if not request.path.startswith(PATH):
                return web.Response(status=404)
            target = url + request.path.removeprefix(PATH)
            headers = {"Accept": request.headers.get("Accept", "*/*")}
            data = await request.read() or None
            if data is not None:
                headers["Content-Type"] = request.content_type
            async with client.request(request.method, target, data=data, headers=headers) as answer:
                kept = {
                    name: answer.headers[name]
                    for name in ("Content-Type", "Content-Security-Policy")
                    if name in answer.headers
                }
                return web.Response(status=answer.status, body=await answer.read(), headers=kept)

        runner = web.ServerRunner(web.Server(pass_on))
        await runner.setup()
        try:
            site = web.TCPSite(runner, HOST, 0)
            await site.start()
            yield f"http://{HOST}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def test_the_page_works_under_any_path(rig: Rig, tab: Tab) -> None:
    async with proxy_to(rig.url) as url:
        await open_page(tab, url + PATH)
        assert await tab.text("#model-name") == "org/fake-model"
        await ask(tab, "hi")
        assert await answered(tab) == "Hello"
