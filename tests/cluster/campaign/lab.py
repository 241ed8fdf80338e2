"""One namespace of the test cluster, asked without blocking: what scenarios do to it, and a picture of all that is in it."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import aiohttp

from cluster.operators import TRAINER_READY, pods_unsaid
from streamrl import names

JOB = "sums"
GROUP = "/apis/streamrl.io/v1alpha1"
PATHS = {
    "rljobs": GROUP,
    "generatorpools": GROUP,
    "statefulsets": "/apis/apps/v1",
    "pods": "/api/v1",
    "serviceaccounts": "/api/v1",
    "configmaps": "/api/v1",
    "secrets": "/api/v1",
    "services": "/api/v1",
    "persistentvolumeclaims": "/api/v1",
    "networkpolicies": "/apis/networking.k8s.io/v1",
    "poddisruptionbudgets": "/apis/policy/v1",
}
EVENTS, LEASES = "/apis/events.k8s.io/v1", "/apis/coordination.k8s.io/v1"
_CLAIM = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
NAMED_OBJECTS: tuple[tuple[str, dict[str, Any]], ...] = (
    *(
        ("secrets", {"metadata": {"name": name}, "stringData": {"token": "t"}})
        for name in ("hub", "cloud", "one", "two")
    ),
    ("configmaps", {"metadata": {"name": "prompts"}, "data": {"a": "b"}}),
    *(("persistentvolumeclaims", {"metadata": {"name": name}, "spec": _CLAIM}) for name in ("models", "shared")),
)
"""What drawn specs name; without them no pod is made."""
_OF_THE_NAMESPACE = {
    ("configmaps", "kube-root-ca.crt"),
    ("serviceaccounts", "default"),
    *((plural, body["metadata"]["name"]) for plural, body in NAMED_OBJECTS),
}
_CONTENT = {"merge": "application/merge-patch+json", "json": "application/json-patch+json"}

Objects = dict[tuple[str, str], dict[str, Any]]
"""(plural, name) -> object."""


class AskedError(Exception):
    """The API server refused what the campaign itself asked."""

    def __init__(self, text: str, *, code: int, message: str) -> None:
        self.code, self.message = code, message
        super().__init__(f"{text}: {code} {message}")


class Lab:
    """A namespace and what is done to it, as its administrator."""

    def __init__(self, session: aiohttp.ClientSession, server: str, namespace: str) -> None:
        self.session, self.server, self.namespace = session, server, namespace

    async def ask(self, method: str, path: str, body: Any = None, *, content: str = "application/json") -> Any:
        """One request.

        Raises:
            AskedError: it was refused.
        """
        options: dict[str, Any] = {} if body is None else {"json": body, "headers": {"Content-Type": content}}
        async with self.session.request(method, self.server + path, **options) as answer:
            found = await answer.json(content_type=None)
            if not answer.ok:
                message = str(found.get("message", "")) if isinstance(found, dict) else ""
                raise AskedError(f"{method} {path}", code=answer.status, message=message)
            return found

    def path(self, plural: str, name: str = "", part: str = "") -> str:
        """Of a collection, an object, or a part of it."""
        parts = (f"{PATHS[plural]}/namespaces/{self.namespace}/{plural}", name, part)
        return "/".join(each for each in parts if each)

    async def open(self) -> None:
        """Make the namespace."""
        await self.ask("POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace}})

    async def close(self) -> None:
        """Have it deleted, some time."""
        # Nobody is left to take the finalizer off.
        for job in (await self.ask("GET", self.path("rljobs")))["items"]:
            await self.patch("rljobs", job["metadata"]["name"], {"metadata": {"finalizers": None}})
        await self.ask("DELETE", f"/api/v1/namespaces/{self.namespace}")

    async def create(self, plural: str, body: Mapping[str, Any]) -> Any:
        """Make an object."""
        return await self.ask("POST", f"{self.path(plural)}?fieldValidation=Strict", body)

    async def patch(self, plural: str, name: str, change: Any, *, part: str = "", kind: str = "merge") -> Any:
        """Change an object."""
        return await self.ask("PATCH", self.path(plural, name, part), change, content=_CONTENT[kind])

    async def delete(self, plural: str, name: str) -> Any:
        """Delete an object."""
        return await self.ask("DELETE", self.path(plural, name))

    async def replace_spec(self, spec: Mapping[str, Any]) -> Any:
        """The whole spec of the job: what is absent goes back to its default."""
        return await self.patch("rljobs", JOB, [{"op": "replace", "path": "/spec", "value": spec}], kind="json")

    async def free_lease(self) -> None:
        """As if the time of a dead operator's Lease were over."""
        await self._to_lease("DELETE")

    async def steal_lease(self) -> None:
        """As if another operator had taken the Lease, and died at once."""
        await self._to_lease("PATCH", {"spec": {"holderIdentity": "thief", "leaseDurationSeconds": 2}})

    async def _to_lease(self, method: str, body: Any = None) -> None:
        try:
            path = f"{LEASES}/namespaces/{self.namespace}/leases/streamrl-operator"
            await self.ask(method, path, body, content=_CONTENT["merge"])
        except AskedError as error:
            if error.code != 404:
                raise

    async def everything(self) -> Objects:
        """All objects of the kinds that the operator has to do with. Trainers' new pods become ready with it: pools wait for them."""
        answers = await asyncio.gather(*(self.ask("GET", self.path(plural)) for plural in PATHS))
        for name in pods_unsaid(dict(zip(PATHS, answers, strict=True))["pods"]["items"]):
            with contextlib.suppress(AskedError):  # it is gone by now
                await self.patch("pods", name, TRAINER_READY, part="status")
        return {
            (plural, each["metadata"]["name"]): each
            for plural, answer in zip(PATHS, answers, strict=True)
            for each in answer["items"]
            if (plural, each["metadata"]["name"]) not in _OF_THE_NAMESPACE
        }

    async def told(self) -> list[tuple[str, str]]:
        """(reason, note) of the operator's events, in order of time."""
        found = (await self.ask("GET", f"{EVENTS}/namespaces/{self.namespace}/events"))["items"]
        ours = [each for each in found if each.get("reportingController") == "streamrl.io/operator"]
        ours.sort(key=lambda each: str(each.get("eventTime")))
        return [(each["reason"], each.get("note", "")) for each in ours]

    async def scale(self, pool: str, replicas: int) -> None:
        """As `kubectl scale` does."""
        await self.patch("generatorpools", names.pool(JOB, pool), {"spec": {"replicas": replicas}}, part="scale")
