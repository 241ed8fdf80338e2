"""RLClusters at home, against an API server that answers by a script: what a reconcile may believe of them, and when."""

import asyncio
from typing import Any

from aiohttp import web

from streamrl_operator.clock import OperatorClock
from streamrl_operator.clusters.registry import Members
from streamrl_operator.kube.cluster import CachedCluster
from streamrl_operator.work_queue import WorkQueue
from support.api_server import client_of
from support.observed_jobs import NOW

LIST = "/apis/streamrl.io/v1alpha1/rlclusters"
NAMES = ("east", "north", "west")


def cluster(name: str, version: int) -> dict[str, Any]:
    metadata = {"name": name, "uid": f"u-{name}", "resourceVersion": str(version), "generation": 1}
    spec = {
        "source": {"kubeconfigSecretName": name},
        "namespaces": [{"hub": "default", "member": "there"}],
        "exposure": {"address": {"host": "192.0.2.7"}},
    }
    return {"apiVersion": "streamrl.io/v1alpha1", "kind": "RLCluster", "metadata": metadata, "spec": spec}


async def test_rlclusters_are_known_all_at_once_however_long_a_write_to_one_takes() -> None:
    writes, ends = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/api/v1/namespaces/kube-system":
            return web.json_response(
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kube-system", "uid": "u"}}
            )
        if request.method == "GET" and request.path == LIST and "watch" not in request.query:
            items = [cluster(name, number) for number, name in enumerate(NAMES, start=2)]
            return web.json_response({"metadata": {"resourceVersion": "9"}, "items": items})
        if request.method == "PATCH" or "watch" in request.query:
            if request.method == "PATCH":
                writes.set()
            await ends.wait()
        return web.json_response({"kind": "Status", "code": 404, "reason": "NotFound", "message": "none"}, status=404)

    async with client_of(answer) as client:
        clock = OperatorClock(now=lambda: NOW, monotonic=lambda: 0.0)
        home = CachedCluster(client, changed=lambda *_: None)
        members = Members(home=home, queue=WorkQueue(clock=clock.monotonic), namespace="streamrl", clock=clock)
        running = asyncio.create_task(members.run(), name="members")
        try:
            await asyncio.wait_for(writes.wait(), 60.0)
            views = [members.view(name, ("default", "j"), uid="u", is_there=False) for name in NAMES]
            assert members.is_known
            assert [view.exposure is not None for view in views] == [True] * len(NAMES)
        finally:
            ends.set()
            running.cancel()
            await asyncio.wait([running])
