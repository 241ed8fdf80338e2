"""What a case runs on: a namespace, an operator behind a proxy, and the waits of both.

Owns: set-up and end of one case, "it looks as it should", "it stays so for two resyncs". Does not own: stories (`scenarios.py`), harm
(`faults.py`), which case is which (`cases.py`).
"""

import asyncio
import itertools
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from cluster import rights
from cluster.campaign import proxy as proxies
from cluster.campaign.lab import Lab, Objects
from cluster.campaign.normal import Picture, differences, picture
from cluster.campaign.process import OperatorProcess
from cluster.campaign.proxy import Proxy, Upstream
from cluster.harness.base import Cluster
from cluster.harness.control_plane import ControlPlane
from streamrl import keys
from streamrl_operator.kube.kubeconfig import find
from support.ports import free_port

USER = "streamrl-operator-in-a-campaign"
LEASE_S = 60.0
"""Not lost on a machine that does much else; a dead operator's Lease is taken away by the campaign, as if its time were over."""
RESYNC_S = 2.0
RESYNCS = 2
DEADLINE_S = 150.0
"""For what takes one second on an idle machine; an operator that failed often may wait a minute before it tries again."""
_GIVEN_UP_S = 75.0
"""An operator that has written nothing for so long waits for nothing any more; its longest pause is a minute."""
_LOOK_S, _PATIENCE_S = 0.15, 1.0
_KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "c",
    "contexts": [{"name": "c", "context": {"cluster": "c"}}],
}
"""Plain HTTP on this machine, without a user: the proxy shows the operator's credentials."""


class WrongError(Exception):
    """The oracle says no; the text says why."""


@dataclass(slots=True)
class Bench:
    """A control plane, with connections as administrator and as operator."""

    server: str
    admin: aiohttp.ClientSession
    upstream: Upstream
    folder: Path
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    @asynccontextmanager
    async def station(self, stem: str) -> AsyncIterator["Station"]:
        """A fresh namespace with an operator that is not yet started."""
        namespace = f"{stem}-{next(self._numbers)}-{os.urandom(3).hex()}"
        lab, proxy = Lab(self.admin, self.server, namespace), Proxy(self.upstream)
        await lab.open()
        address, port = await proxy.start(), free_port()
        operator = self._operator(namespace, address=address, port=port)
        station = Station(lab=lab, proxy=proxy, operator=operator, port=port)
        try:
            yield station
        except BaseException:
            _keep(operator.log)
            raise
        finally:
            station.operator.kill()
            await proxy.close()
            await lab.close()

    def _operator(self, namespace: str, *, address: str, port: int) -> OperatorProcess:
        kubeconfig = self.folder / f"{namespace}.json"
        kubeconfig.write_text(json.dumps(_KUBECONFIG | {"clusters": [{"name": "c", "cluster": {"server": address}}]}))
        environ = {
            keys.ENV_KUBECONFIG: str(kubeconfig),
            keys.ENV_NAMESPACES: namespace,
            keys.ENV_POD_NAME_OPERATOR: "operator",
            keys.ENV_POD_NAMESPACE: namespace,
            keys.ENV_TRAINER_IMAGE: "trainer:test",
            keys.ENV_GENERATOR_IMAGE: "generator:test",
            keys.ENV_RESYNC_SECONDS: str(RESYNC_S),
            keys.ENV_LEASE_SECONDS: str(LEASE_S),
            keys.ENV_SIGNALS_PORT: str(port),
            keys.ENV_BIND_HOST: "127.0.0.1",
        }
        return OperatorProcess(environ, self.folder / f"{namespace}.log")


def _keep(log: Path) -> None:
    """Where the harness's logs are kept, an operator's log of a case that went wrong is too."""
    if (kept := os.environ.get("STREAMRL_CLUSTER_LOGS")) and log.exists():
        Path(kept).mkdir(parents=True, exist_ok=True)
        shutil.copy(log, kept)


@asynccontextmanager
async def open_bench(cluster: Cluster) -> AsyncIterator[Bench]:
    """Connections to a cluster for the block. The operator has the rights that the chart gives it; in a cluster that was given, it is its
    administrator."""
    folder = cluster.folder / "campaign"
    folder.mkdir(exist_ok=True)
    is_ours = isinstance(cluster, ControlPlane)
    admin = find(cluster.kubeconfig)
    operator = find(cluster.kubeconfig_for(USER) if is_ours else cluster.kubeconfig)
    if is_ours:
        rights.grant(cluster.api, USER, home="")
    connector = aiohttp.TCPConnector(ssl=admin.tls or False, limit=64)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session,
        proxies.upstream(operator) as upstream,
    ):
        yield Bench(server=admin.server, admin=session, upstream=upstream, folder=folder)


@dataclass(slots=True, kw_only=True)
class Station:
    """One namespace, one operator, one proxy between it and the API server."""

    lab: Lab
    proxy: Proxy
    operator: OperatorProcess
    port: int
    """Of the operator's pages."""
    was_killed: bool = False
    """And nobody has freed its Lease yet."""
    view: Callable[[Picture], Picture] = lambda whole: whole
    """What of a picture is compared."""

    async def picture(self) -> Picture:
        """What is there now, without what differs by nature."""
        return self.view(picture(await self.lab.everything(), namespace=self.lab.namespace))

    async def restart(self) -> None:
        """The dead operator's Lease is over, and another begins."""
        await until(lambda: not self.operator.runs, "the operator to be dead")
        await self.lab.free_lease()
        self.operator.start()

    async def wait_until_equal(self, want: Picture, *, but: Collection[str] = ()) -> None:
        """Until the namespace shows `want`, and the operator acts and knows all there is.

        Raises:
            WrongError: it does not, in time.
        """
        seen, looked_s, begun_s, left = -1, 0.0, time.monotonic(), ["never looked at"]
        while time.monotonic() < begun_s + DEADLINE_S:
            now_s, done = time.monotonic(), len(self.proxy.writes)
            if done != seen or now_s > looked_s + _PATIENCE_S:
                seen, looked_s = done, now_s
                left = differences(await self.picture(), want, but=but)
                if not left and await self._acts():
                    return
            if now_s > max(begun_s, self.proxy.last_write_s) + _GIVEN_UP_S:
                break
            await asyncio.sleep(_LOOK_S)
        waited_s, why = time.monotonic() - begun_s, left or ["the operator does not act"]
        raise WrongError(f"not as undisturbed after {waited_s:.0f} s: {'; '.join(why)}; {await self._seen()}")

    async def _seen(self) -> str:
        """What the operator did last, for a failure's text."""
        state = "runs" if self.operator.runs else "has ended by itself"
        looks, quiet_s = await self.metric("reconciles_total"), time.monotonic() - self.proxy.last_write_s
        return f"the operator {state}, {looks:g} looks, last write {quiet_s:.0f} s ago; its log: {self.operator.lines()[-1:]}"

    async def wait_until_right(self, wrong: Callable[[Objects], str]) -> None:
        """Until nothing is wrong any more.

        Raises:
            WrongError: something is, in time.
        """
        end_s = time.monotonic() + DEADLINE_S
        while left := wrong(await self.lab.everything()):
            if time.monotonic() > end_s:
                raise WrongError(f"after {DEADLINE_S:g} s: {left}")
            await asyncio.sleep(_LOOK_S)

    async def stays(self, want: Picture | None, *, looks: bool, but: Collection[str] = ()) -> Picture:
        """Two resyncs without a write or an event; what is there then. `looks`: resyncs are to be seen in the metrics.

        Raises:
            WrongError: something was written, or is not as it should be.
        """
        writes, events, looked = len(self.proxy.writes), self.proxy.events, await self.metric("reconciles_total")
        end_s = time.monotonic() + DEADLINE_S
        await asyncio.sleep(RESYNCS * RESYNC_S)
        while looks and await self.metric("reconciles_total") < looked + RESYNCS:
            if time.monotonic() > end_s:
                raise WrongError(f"fewer than {RESYNCS} looks in {DEADLINE_S:g} s")
            await asyncio.sleep(_LOOK_S)
        if (made := len(self.proxy.writes) - writes) > 0:
            raise WrongError(f"{made} writes at rest, the first is {self.proxy.writes[writes].text}")
        if self.proxy.events != events:
            raise WrongError(f"{self.proxy.events - events} events at rest")
        found = await self.picture()
        if want is not None and (left := differences(found, want, but=but)):
            raise WrongError(f"it did not stay so: {'; '.join(left)}")
        return found

    async def metric(self, name: str) -> float:
        """One of the operator's metrics; 0 where nobody answers."""
        text = await self._page("metrics")
        lines = [line for line in text.splitlines() if line.startswith(f"streamrl_operator_{name}")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def _acts(self) -> bool:
        """Whether it leads, knows all there is, and has looked."""
        if await self._page("readyz") != "ok\n" or await self.metric("leader") != 1:
            return False
        return await self.metric("reconciles_total") > 0

    async def _page(self, name: str) -> str:
        try:
            async with self.lab.session.get(f"http://127.0.0.1:{self.port}/{name}", ssl=False) as answer:
                return await answer.text()
        except aiohttp.ClientError:
            return ""


async def until(check: Callable[[], bool], what: str, *, deadline_s: float = DEADLINE_S) -> None:
    """Wait for a condition.

    Raises:
        WrongError: it did not come.
    """
    end_s = time.monotonic() + deadline_s
    while not check():
        if time.monotonic() > end_s:
            raise WrongError(f"waited {deadline_s:g} s for {what}")
        await asyncio.sleep(0.02)
