"""Schedulers that answer, refuse or keep silent: addresses of Services and fake pods, in a network namespace of the benchmark's own.

KWOK's pods have addresses and nothing behind them, and nothing leads from a Service to a pod. Here the addresses of both are this machine's own,
and one server behind them all gives the scheduler's /numbers page, with a step that goes on: to the operator at the job's Service, or to the API
server's proxy at the pod. The namespace is the process's and goes with it: no route is left.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import time
from typing import Literal

from aiohttp import web

from cluster.harness.flags import Settings
from streamrl import names

CIDRS = (Settings().cluster_cidr, Settings().service_cidr)
"""As the control plane gives them to nodes and to Services."""
STEP_S = 10.0
"""Every fake job does a step in this time, so a refresh always has news."""
_INSIDE = "STREAMRL_OPERATOR_SCALE_INSIDE"

Pods = Literal["answer", "refuse", "silent"]


def enter(pods: Pods) -> None:
    """Go on as the same program in a network namespace of its own; returns there."""
    if os.environ.get(_INSIDE):
        for command in _commands(pods):
            subprocess.run(command, check=True)
        return
    unshare = shutil.which("unshare")
    if unshare is None or shutil.which("ip") is None:
        raise SystemExit("operator_scale: needs unshare (util-linux) and ip (iproute2)")
    own = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    os.execve(unshare, [unshare, *own, "--net", sys.executable, *sys.argv], os.environ | {_INSIDE: "1"})  # noqa: S606


def _commands(pods: Pods) -> list[list[str]]:
    commands = [["ip", "link", "set", "lo", "up"]]
    if pods == "answer":
        commands += [["ip", "route", "add", "local", cidr, "dev", "lo"] for cidr in CIDRS]
    elif pods == "silent":
        # A cable into nothing; without ARP nobody notices that nobody is there.
        commands.append(["ip", "link", "add", "void", "type", "veth", "peer", "name", "nothing"])
        commands.append(["ip", "link", "set", "nothing", "up"])
        commands.append(["ip", "link", "set", "void", "arp", "off", "up"])
        commands += [["ip", "route", "add", cidr, "dev", "void"] for cidr in CIDRS]
    return commands


class Numbers:
    """The page of every scheduler, in a thread, until the process ends."""

    def __init__(self) -> None:
        self.asked = 0
        self._begun_s = time.monotonic()
        self._loop = asyncio.new_event_loop()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop)
        threading.Thread(target=self._loop.run_forever, name="numbers", daemon=True).start()

    async def _serve(self) -> None:
        application = web.Application()
        application.add_routes([web.get("/numbers", self._page)])
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "0.0.0.0", names.PORT_SIGNALS, backlog=4096).start()  # noqa: S104 - nobody else is here

    async def _page(self, _: web.Request) -> web.Response:
        self.asked += 1
        step = int((time.monotonic() - self._begun_s) / STEP_S)
        page = {"attempt": 1, "step": step, "queue": step % 7, "ended": False, "last_evaluation": {"mean_reward": 0.5}}
        return web.json_response(page)
