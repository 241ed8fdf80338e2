"""The operator's process: wires the parts, and ends in order.

    health pages ── always          leader ── waits for the Lease ──▶ handlers ── caches, queue, looks

Exit codes: 0 told to end (SIGTERM, SIGINT), 2 the configuration cannot be used, 75 start me again (the Lease was lost).
On SIGTERM the looks are cancelled (a look that is interrupted is made good by the next one), then the Lease is given back: < 5 s.
"""

import asyncio
import logging
import signal
import sys
from functools import partial

from streamrl.errors import EXIT_DONE, EXIT_FAULT, EXIT_RETRY, EXIT_USER_ERROR, UserError
from streamrl_operator import health, logs
from streamrl_operator.clock import Clock
from streamrl_operator.events import Events
from streamrl_operator.handlers import WORKERS, Handlers
from streamrl_operator.jobs import JobWatch
from streamrl_operator.kube import access
from streamrl_operator.kube.client import Client
from streamrl_operator.kube.cluster import Cluster
from streamrl_operator.leader import Leader, LeaseLostError
from streamrl_operator.metrics import Metrics
from streamrl_operator.reconcile import Reconciler
from streamrl_operator.settings import OperatorSettings, from_environment
from streamrl_operator.work import Hands, WorkQueue

LEASE_NAME = "streamrl-operator"

log = logging.getLogger(__name__)


def main() -> int:
    """Run until told to end; the exit code."""
    try:
        settings = from_environment()
        logs.begin(settings.log_level)
        asyncio.run(_serve(settings))
    except UserError as error:
        print(f"streamrl_operator: {error}", file=sys.stderr)  # noqa: T201 - the one line for whoever starts it
        return EXIT_USER_ERROR
    except LeaseLostError as error:
        log.error("lease lost", extra={"error": str(error)})  # noqa: TRY400 - the line says it all
        return EXIT_RETRY
    except Exception:
        log.exception("the operator failed")
        return EXIT_FAULT
    return EXIT_DONE


async def _serve(settings: OperatorSettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    metrics, clock = Metrics(), Clock()
    async with Client(access.find(settings.kubeconfig), count=metrics.requested) as client:
        handlers = _handlers(settings, client=client, metrics=metrics, clock=clock)
        leader = Leader(
            client=client,
            namespace=settings.planning.namespace,
            name=LEASE_NAME,
            me=settings.identity,
            terms=settings.terms,
            clock=clock,
            leading=metrics.leading,
        )

        def unready() -> str:
            return handlers.cluster.sight.unready() if leader.is_leading else leader.unled()

        async with health.serve(host=settings.host, port=settings.port, metrics=metrics, unready=unready) as port:
            log.info("started", extra={"port": port, "identity": settings.identity, "server": client.access.server})
            await _until(stop, asyncio.create_task(leader.lead(handlers.run), name="lead"))
    log.info("ended")


def _handlers(settings: OperatorSettings, *, client: Client, metrics: Metrics, clock: Clock) -> Handlers:
    queue, hands = WorkQueue(clock=clock.monotonic), Hands(WORKERS)

    def told(namespace: str, is_whole: bool) -> None:  # noqa: FBT001 - as it is told
        metrics.seen(namespace, is_whole)
        if not is_whole:
            jobs.doubt()  # kopf would go on asking there

    cluster = Cluster(client, queue.add, namespaces=settings.planning.namespaces, told=told)
    jobs = JobWatch(
        client=client,
        find_access=partial(access.find, settings.kubeconfig),
        store=cluster.job_store,
        sight=cluster.sight,
        count=metrics.requested,
    )
    metrics.gauge("queue_depth", "Jobs that are due and wait for a worker.", queue.depth)
    metrics.gauge("objects", "Objects in the caches.", lambda: sum(cluster.counts().values()))
    reconciler = Reconciler(
        cluster=cluster,
        events=Events(client=client, clock=clock, instance=settings.identity),
        settings=settings.planning,
        lives=settings.lives,
        clock=clock,
        aside=hands.aside,
    )
    metrics.gauge(
        "unreachable_jobs", "Jobs whose scheduler's numbers cannot be read for minutes.", reconciler.unreachable
    )
    return Handlers(cluster=cluster, jobs=jobs, reconciler=reconciler, queue=queue, hands=hands, metrics=metrics)


async def _until(stop: asyncio.Event, task: asyncio.Future[None]) -> None:
    """Until told to end, or the work has failed."""
    waiting = asyncio.create_task(stop.wait(), name="told to end")
    try:
        await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        task.cancel()
        await asyncio.wait((waiting, task))
    if not task.cancelled():
        task.result()
