"""`streamrl logs --follow` of a job in two clusters, one of which is lost: the other goes on, and it is said once."""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from streamrl import API_VERSION, names
from streamrl_cli.cluster import logs

SOON_S = 60.0


class Cluster:
    """An API server that has one pod, whose log grows."""

    def __init__(self, pod: str, **labels: str) -> None:
        self.job: dict[str, Any] = {}
        self.is_cut = False
        self.answers = 0
        self.lines: asyncio.Queue[str | None] = asyncio.Queue()
        container = {"name": names.CONTAINER_GENERATOR}
        self.pod = {
            "metadata": {"name": pod, "namespace": "ml", "uid": f"u-{pod}", "resourceVersion": "2", "labels": labels},
            "spec": {"containers": [container]},
            "status": {"containerStatuses": [container | {"restartCount": 0, "state": {"running": {}}}]},
        }

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.is_cut:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        self.answers += 1
        if request.path.endswith("/log"):
            return await self._log(request)
        if request.path.endswith("/pods"):
            return web.json_response(
                {"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "9"}, "items": [self.pod]}
            )
        return web.json_response(self.job)

    async def _log(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while (line := await self.lines.get()) is not None:
            if self.is_cut:
                assert request.transport is not None
                request.transport.abort()
                break
            await response.write(f"{line}\n".encode())
        return response


@asynccontextmanager
async def served(**clusters: Cluster) -> AsyncIterator[dict[str, Any]]:
    """A kubeconfig with a context for each."""
    async with AsyncExitStack() as stack:
        config: dict[str, Any] = {"current-context": "home", "clusters": [], "contexts": [], "users": []}
        for name, cluster in clusters.items():
            application = web.Application()
            application.router.add_route("*", "/{path:.*}", cluster.answer)
            server = TestServer(application)
            await server.start_server(shutdown_timeout=0.1)
            stack.push_async_callback(server.close)
            config["clusters"].append({"name": name, "cluster": {"server": str(server.make_url("")).rstrip("/")}})
            config["contexts"].append({"name": name, "context": {"cluster": name}})
        yield config


class Heard:
    """What the command has written so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._out, self._err = "", ""

    def _take(self) -> None:
        captured = self._capsys.readouterr()
        self._out, self._err = self._out + captured.out, self._err + captured.err

    def lines(self, text: str) -> int:
        """With this text in them."""
        self._take()
        return sum(text in line for line in (self._out + self._err).splitlines())


async def until(holds: Callable[[], bool], running: asyncio.Task[int]) -> None:
    async with asyncio.timeout(SOON_S):
        while True:
            if holds():
                return
            assert not running.done(), running
            await asyncio.sleep(0.01)


async def test_the_logs_go_on_while_a_member_is_lost_and_say_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "INTERVAL_S", 0.01)
    home, east, heard = Cluster("near-0"), Cluster("far-0", **{names.LABEL_CLUSTER: "east"}), Heard(capsys)
    home.job = {
        "apiVersion": API_VERSION,
        "kind": "RLJob",
        "metadata": {"name": "sum", "namespace": "ml", "uid": "u-sum", "resourceVersion": "2"},
        "spec": {"generators": [{"name": "near"}, {"name": "far", "clusterName": "east"}]},
        "status": {"clusters": [{"name": "east", "namespace": "there", "clusterUID": "u-east"}], "conditions": []},
    }
    async with served(home=home, east=east) as config:
        (tmp_path / "config").write_text(json.dumps(config))
        args = argparse.Namespace(
            job="sum", role=["generators"], pool=None, follow=True, tail=None, previous=False, member_context=["east"],
            kubeconfig=tmp_path / "config", context=None, namespace="ml",
        )  # fmt: skip
        east.is_cut = True
        running = asyncio.create_task(logs.run(args), name="logs")
        await until(lambda: heard.lines("member cluster east cannot be reached") > 0, running)
        home.lines.put_nowait("one")
        await until(lambda: heard.lines("[near-0] one") > 0, running)
        east.is_cut = False
        east.lines.put_nowait("two")
        await until(lambda: heard.lines("[far-0] two") > 0, running)
        assert heard.lines("member cluster east can be reached again") == 1
        east.is_cut = True
        east.lines.put_nowait("lost")
        await until(lambda: heard.lines("cannot be reached") > 1, running)
        answers = home.answers
        await until(lambda: home.answers > answers + 9, running)
        assert heard.lines("cannot be reached") == 2, "once for each loss"
        home.job["status"]["conditions"] = [{"type": "Succeeded", "status": "True", "reason": "Completed"}]
        home.lines.put_nowait(None)
        assert await asyncio.wait_for(running, SOON_S) == 0
