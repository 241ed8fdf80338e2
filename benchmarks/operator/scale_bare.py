"""What a user's own loop would do without an operator: the same objects, by server-side apply, as fast as it can.

Owns: the bodies (planned and encoded before the clock starts), and the loop: one process, `CONCURRENT` jobs at once, the objects of a job
one after the other in the operator's own order. The answers are read and thrown away; nothing is compared, asked for or watched.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from streamrl import names
from streamrl_operator import tls_secrets
from streamrl_operator.controller import WORKERS
from streamrl_operator.kube.kinds import APPLIED, RLJOB, of
from streamrl_operator.kube.kubeconfig import find
from streamrl_operator.observe import validated
from streamrl_operator.planning.certificates import Lives
from streamrl_operator.planning.life import decide
from streamrl_operator.planning.objects import plan_objects
from streamrl_operator.planning.objects.shared import JobPlan
from streamrl_operator.planning.values import Observed, PlanningSettings

CONCURRENT = WORKERS
"""As many jobs at once as the operator looks at."""
MANAGER = "bare-loop"
_REQUEST_S = 120.0
_BUSY = 500
"""HTTP status from which on another attempt may do."""
_APPLY = {"Content-Type": "application/apply-patch+yaml"}

Json = dict[str, Any]
Item = TypeVar("Item")


class RequestRefusedError(Exception):
    """The API server did not do what was asked."""

    def __init__(self, what: str, *, status: int, text: str) -> None:
        super().__init__(f"{what}: {status} {text}")
        self.is_busy = status >= _BUSY


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One object, ready to be sent."""

    path: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """An API server, as its administrator."""

    address: str
    session: aiohttp.ClientSession

    async def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
        """One request; the body of the answer.

        Raises:
            RefusedError: it was refused.
        """
        content = {"Content-Type": "application/json"} if body is not None else {}
        async with self.session.request(method, self.address + path, data=body, headers=content | headers) as answer:
            text = await answer.read()
            if not answer.ok:
                raise RequestRefusedError(
                    f"{method} {path}", status=answer.status, text=text[:300].decode(errors="replace")
                )
            return text


@asynccontextmanager
async def connect(kubeconfig: Path) -> AsyncIterator[Server]:
    """Connections for the block."""
    found = find(kubeconfig)
    connector = aiohttp.TCPConnector(ssl=found.tls or False, limit=0)
    limit = aiohttp.ClientTimeout(total=_REQUEST_S)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        yield Server(address=found.server, session=session)


async def each(items: Iterable[Item], work: Callable[[Item], Awaitable[None]]) -> float:
    """`work` for every item, `CONCURRENT` at once; seconds."""
    left, begun_s = iter(items), time.monotonic()

    async def one() -> None:
        for item in left:
            await work(item)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONCURRENT):
            tasks.create_task(one())
    return time.monotonic() - begun_s


async def create_jobs(server: Server, documents: Iterable[Json], *, namespace: str) -> list[Json]:
    """The jobs as the API server stores them."""
    made: list[Json] = []

    async def create(document: Json) -> None:
        made.append(json.loads(await server.ask("POST", RLJOB.path(namespace), json.dumps(document).encode())))

    await each(documents, create)
    return made


async def apply_jobs(server: Server, jobs: Iterable[Sequence[Write]]) -> float:
    """Apply all objects of all jobs; seconds."""

    async def apply(writes: Sequence[Write]) -> None:
        for write in writes:
            path = f"{write.path}?fieldManager={MANAGER}&force=true"
            await server.ask("PATCH", path, write.body, **_APPLY)

    return await each(jobs, apply)


def writes_of(stored: Json, settings: PlanningSettings) -> list[Write]:
    """Every object that the operator makes for a job, certificates and all, in the order in which it makes them."""
    job, invalid = validated(stored)
    assert job is not None, invalid
    metadata, now = stored["metadata"], datetime.now(UTC)
    decision = decide(Observed(now=now, raw=stored, job=job), settings=settings)
    sizes = {pool.name: pool.scaling.initial for pool in job.spec.pools}  # the operator's wait for the trainer
    wanted = replace(decision.wanted, generators=sizes)
    plan = JobPlan(job=job, namespace=metadata["namespace"], uid=metadata["uid"], wanted=wanted, settings=settings)
    known: dict[str, Json] = {}
    while len(known) < len(tls_secrets.secret_names(plan.name)):
        made, _ = tls_secrets.due(plan, known, now=now, lives=Lives())
        known |= {secret["metadata"]["name"]: secret for secret in made}
    planned = plan_objects(plan)
    ordered = sorted([*known.values(), *planned], key=lambda obj: APPLIED.index(of(obj)))
    return [_write(obj) for obj in ordered]


def _write(obj: Json) -> Write:
    metadata = obj["metadata"]
    path = of(obj).path(metadata["namespace"], metadata["name"])
    return Write(path=path, body=json.dumps(obj, separators=(",", ":")).encode())


def volumes(job: str, *, namespace: str) -> list[Json]:
    """A volume for each claim of a job, bound to it before it is there: nothing provisions any here."""
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{namespace}-{claim}"},
            "spec": {
                "capacity": {"storage": "100Ti"},
                "accessModes": ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"],
                "claimRef": {"namespace": namespace, "name": claim},
                "hostPath": {"path": "/nowhere"},
            },
        }
        for claim in (names.journal_claim(job), names.checkpoints_claim(job))
    ]
