"""The operator's own pages, read-only: /healthz (the process answers), /readyz (it can do its work, or stands by while another
does), /metrics."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from streamrl_operator.metrics import Metrics

_TEXT = "text/plain; version=0.0.4; charset=utf-8"


@asynccontextmanager
async def serve(*, host: str, port: int, metrics: Metrics, unready: Callable[[], str]) -> AsyncIterator[int]:
    """Serve the pages inside the block; gives the port. `unready`: why it is not ready, empty if it is."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        why = unready()
        return web.Response(text=f"{why or 'ok'}\n", status=503 if why else 200)

    async def page(_: web.Request) -> web.Response:
        return web.Response(body=metrics.page(), headers={"Content-Type": _TEXT})

    application = web.Application()
    application.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", page)])
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
