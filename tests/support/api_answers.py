"""An API server with jobs as tests give them, and a scheduler behind its proxy: for pages that only read."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from support.jobs import simulated_job

HOSTILE = "<script>alert(1)</script>\x1b[2J\u202e"
PROCESS = {"bubbles": {"busy": 3.0, "pipeline_no_prompts": 1.0}, "wall_s": 4.0}
PAGE: dict[str, Any] = {
    "attempt": 2,
    "step": 6,
    "steps": 20,
    "queue": 17,
    "running": 5,
    "cost": 1.5,
    "announced_step": 6,
    "checkpoint_step": 5,
    "groups": {"scored": 3, "dropped": 0},
    "generators": [{"id": HOSTILE, "pool": "sim", "slots": 8, "active": 6, "version": 5, **PROCESS}],
    "trainer": {"id": "trainer-0", **PROCESS},
    "dispatch": {"why": f"long ones first {HOSTILE}", "longest_first": True, "long_generators": [], "pools": {}},
    "warnings": [{"type": "TrackerDown", "message": f"tracker wandb {HOSTILE}"}],
    "last_evaluation": {"step": 4, "mean_reward": 0.75, "prompts": 8},
}

CURVES: dict[str, Any] = {
    "steps": [
        {
            "step": step,
            "reward_mean": 0.1 * step,
            "tokens_per_s": 100.0,
            "bubbles": {"generators": {"busy": 0.75, "pipeline_no_prompts": 0.25}, "trainer": None},
        }
        for step in range(6)
    ],
    "evaluations": [{"step": 4, "mean_reward": 0.75, "prompts": 8}],
}


def job(name: str, *, message: str = "all is well", created: str = "2026-01-01T00:00:00Z", **status: Any) -> Any:
    meta = {"name": name, "namespace": "ml", "uid": f"u-{name}", "resourceVersion": "7", "creationTimestamp": created}
    ready = {"type": "Ready", "status": "True", "reason": "Running", "message": message, "lastTransitionTime": created}
    pools = [{"name": "sim", "desired": 2, "ready": 1}]
    found = {"step": 5, "reward": 0.25, "queue": 3, "cost": 12.345, "pools": pools, "conditions": [ready]}
    shares = {"bubbles": {"pipelinePercent": 12.0, "skewPercent": 3.0}}
    return simulated_job() | {"metadata": meta, "status": found | shares | status}


class ApiAnswers:
    """An API server with jobs, and a scheduler behind it."""

    def __init__(self) -> None:
        self.jobs = [job("first"), job("second", created="2026-01-02T00:00:00Z")]
        self.page: Any = PAGE
        self.curves: Any = CURVES
        self.pools: list[Any] = []
        self.events: list[Any] = []
        self.refused: set[str] = set()
        self.requests: Counter[str] = Counter()
        self.methods: set[str] = set()
        self.held: asyncio.Event | None = None
        """No answer comes before it is set."""
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        self.server = TestServer(application)

    async def _answer(self, request: web.Request) -> web.Response:
        self.requests[request.path] += 1
        self.methods.add(request.method)
        if self.held:
            await self.held.wait()
        word = next((one for one in self.refused if one in request.path), None)
        if word:
            text = f'User "page" cannot list {word}'
            return web.json_response({"kind": "Status", "apiVersion": "v1", "message": text}, status=403)
        if "/proxy/" in request.path:
            return web.json_response(self.curves if request.path.endswith("/curves") else self.page)
        for plural, version, kind, items in (
            ("rljobs", "streamrl.io/v1alpha1", "RLJob", self.jobs),
            ("generatorpools", "streamrl.io/v1alpha1", "GeneratorPool", self.pools),
            ("events", "v1", "Event", self.events),
        ):
            if request.path.endswith(plural):
                answer = {"apiVersion": version, "kind": f"{kind}List", "metadata": {"resourceVersion": "9"}}
                return web.json_response(answer | {"items": items})
        return web.Response(status=404)

    def kubeconfig(self, folder: Path) -> Path:
        """A kubeconfig file that leads there."""
        return write_kubeconfig(self.server, folder)


def write_kubeconfig(server: TestServer, folder: Path) -> Path:
    """A kubeconfig file in `folder` that leads to the server."""
    config: dict[str, Any] = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "ml"}}],
        "clusters": [{"name": "c", "cluster": {"server": str(server.make_url("")).rstrip("/")}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return path
