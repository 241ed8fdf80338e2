"""`streamrl logs` of a job in two clusters, one of which is lost or refuses: the other goes on, and it is said once."""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
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
        self.refuses = self.refuses_log = 0
        """The status that is the answer to everything, or to who wants the log; 0: it is given."""
        self.answers = 0
        self.queries: list[dict[str, str]] = []
        """Of who wanted the log and got it, but for the container."""
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
        is_log = request.path.endswith("/log")
        if status := self.refuses or (is_log and self.refuses_log):
            return web.Response(status=status, text="not now")
        if is_log:
            self.queries.append({key: value for key, value in request.query.items() if key != "container"})
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The command, and what it reads."""

    home: Cluster
    east: Cluster
    heard: Heard
    command: asyncio.Task[int]

    async def hears(self, text: str, *, times: int = 1) -> None:
        await self.until(lambda: self.heard.lines(text) >= times)

    async def looks_again(self) -> None:
        """Some more times at home."""
        answers = self.home.answers
        await self.until(lambda: self.home.answers > answers + 9)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON_S):
            while not holds():
                assert not self.command.done(), self.command
                await asyncio.sleep(0.01)

    async def ends(self) -> None:
        """With the job."""
        self.home.job["status"]["conditions"] = [{"type": "Succeeded", "status": "True", "reason": "Completed"}]
        self.home.lines.put_nowait(None)
        assert await asyncio.wait_for(self.command, SOON_S) == 0


@asynccontextmanager
async def running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, follow: bool = True, tail: int | None = None, **east: Any
) -> AsyncIterator[Running]:
    """Logs of a job with a pod at home and one in the member `east`, which is so at the start."""
    home, far = Cluster("near-0"), Cluster("far-0", **{names.LABEL_CLUSTER: "east"})
    for name, value in east.items():
        setattr(far, name, value)
    home.job = {
        "apiVersion": API_VERSION,
        "kind": "RLJob",
        "metadata": {"name": "sum", "namespace": "ml", "uid": "u-sum", "resourceVersion": "2"},
        "spec": {"generators": [{"name": "near"}, {"name": "far", "clusterName": "east"}]},
        "status": {"clusters": [{"name": "east", "namespace": "there", "clusterUID": "u-east"}], "conditions": []},
    }
    async with served(home=home, east=far) as config:
        (tmp_path / "config").write_text(json.dumps(config))
        args = argparse.Namespace(
            job="sum", role=["generators"], pool=None, follow=follow, tail=tail, previous=False, member_context=["east"],
            kubeconfig=tmp_path / "config", context=None, namespace="ml",
        )  # fmt: skip
        command = asyncio.create_task(logs.run(args), name="logs")
        try:
            yield Running(home=home, east=far, heard=Heard(capsys), command=command)
        finally:
            command.cancel()
            await asyncio.gather(command, return_exceptions=True)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "INTERVAL_S", 0.01)


async def test_the_logs_go_on_while_a_member_is_lost_and_say_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path, capsys, is_cut=True) as run:
        await run.hears("member cluster east cannot be reached")
        run.home.lines.put_nowait("one")
        await run.hears("[near-0] one")
        run.east.is_cut = False
        run.east.lines.put_nowait("two")
        await run.hears("[far-0] two")
        assert run.heard.lines("member cluster east can be reached again") == 1
        run.east.is_cut = True
        run.east.lines.put_nowait("lost")
        await run.hears("cannot be reached", times=2)
        await run.looks_again()
        assert run.heard.lines("cannot be reached") == 2, "once for each loss"
        await run.ends()


@pytest.mark.parametrize("status", [401, 403, 429, 502, 503])
async def test_a_member_that_refuses_is_a_lost_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    async with running(tmp_path, capsys, refuses=status) as run:
        await run.hears("member cluster east cannot be reached")
        run.home.lines.put_nowait("one")
        await run.hears("[near-0] one")
        run.east.refuses = 0
        run.east.lines.put_nowait("two")
        await run.hears("[far-0] two")
        run.east.refuses = status
        run.east.lines.put_nowait(None)
        await run.hears("cannot be reached", times=2)
        await run.ends()


@pytest.mark.parametrize("status", [401, 429, 500, 503])
async def test_a_log_that_is_refused_is_named_once_and_asked_for_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    async with running(tmp_path, capsys, refuses_log=status) as run:
        await run.hears("[far-0] ")
        await run.looks_again()
        assert run.heard.lines("[far-0] ") == 1
        run.east.refuses_log = 0
        run.east.lines.put_nowait("two")
        await run.hears("[far-0] two")
        run.east.lines.put_nowait(None)
        await run.ends()


async def test_a_log_that_is_always_refused_does_not_hold_up_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path, capsys, refuses_log=500) as run:
        await run.hears("[far-0] ")
        await run.ends()


async def test_behind_a_cut_the_log_goes_on_from_the_last_line_that_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut is noticed late: what was said in between belongs to what was missed."""
    now_s = 100.0
    monkeypatch.setattr(logs, "monotonic", lambda: now_s)
    async with running(tmp_path, capsys) as run:
        run.east.lines.put_nowait("one")
        await run.hears("[far-0] one")
        now_s += 30.5
        run.east.is_cut = True
        run.east.lines.put_nowait("lost")
        await run.hears("member cluster east cannot be reached")
        now_s += 10
        run.east.is_cut = False
        run.east.lines.put_nowait("two")
        await run.hears("[far-0] two")
        (first, again) = run.east.queries
        assert first == {"follow": "true", "tailLines": "20"}
        assert 41 < int(again.pop("sinceSeconds")) <= 43
        assert again == {"follow": "true"}
        run.east.lines.put_nowait(None)
        await run.ends()


@pytest.mark.parametrize(
    ("tail", "again"), [(None, {"tailLines": "20"}), (5, {"tailLines": "5"}), (0, {"sinceSeconds": "12"})]
)
async def test_a_log_of_which_no_line_has_come_is_asked_for_as_at_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tail: int | None, again: Any
) -> None:
    now_s = 100.0
    monkeypatch.setattr(logs, "monotonic", lambda: now_s)
    async with running(tmp_path, capsys, tail=tail, refuses_log=503) as run:
        await run.hears("[far-0] ")
        now_s += 10
        run.east.refuses_log = 0
        run.east.lines.put_nowait("one")
        await run.hears("[far-0] one")
        assert run.east.queries == [{"follow": "true"} | again]
        run.east.lines.put_nowait(None)
        await run.ends()


async def test_home_is_waited_for_while_it_refuses_for_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with running(tmp_path, capsys) as run:
        run.home.lines.put_nowait("one")
        await run.hears("[near-0] one")
        run.home.refuses = 503
        await run.looks_again()
        run.home.refuses = 0
        run.home.lines.put_nowait("two")
        await run.hears("[near-0] two")
        run.east.lines.put_nowait(None)
        await run.ends()


async def test_without_follow_a_log_that_is_refused_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path, capsys, follow=False, refuses_log=502) as run:
        for line in ("one", None):
            run.home.lines.put_nowait(line)
        assert await asyncio.wait_for(run.command, SOON_S) == 0
        assert run.heard.lines("[near-0] one") == run.heard.lines("[far-0] ") == 1


@pytest.mark.parametrize("status", [403, 503])
async def test_without_follow_a_member_that_is_lost_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    async with running(tmp_path, capsys, follow=False, refuses=status) as run:
        for line in ("one", None):
            run.home.lines.put_nowait(line)
        assert await asyncio.wait_for(run.command, SOON_S) == 0
        assert run.heard.lines("[near-0] one") == run.heard.lines("member cluster east cannot be reached") == 1
