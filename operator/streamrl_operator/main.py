"""The operator's process: wires the parts, and ends in order.

    health pages ── always          leader ── waits for the Lease ──▶ controller ── caches, queue, workers

Exit codes: 0 told to end (SIGTERM, SIGINT), 2 the configuration cannot be used, 75 start me again (the Lease was lost).
On SIGTERM the reconciles are cancelled (a reconcile that is interrupted is made good by the next one), then the Lease is given back: < 5 s.
"""

import asyncio
import json
import logging
import signal
import sys
from datetime import UTC, datetime

from streamrl.errors import EXIT_DONE, EXIT_FAULT, EXIT_RETRY, EXIT_USER_ERROR, UserError
from streamrl.text import say
from streamrl_operator.clock import OperatorClock
from streamrl_operator.clusters.registry import Members
from streamrl_operator.controller import WORKERS, Controller, aside
from streamrl_operator.events import Events
from streamrl_operator.kube import kubeconfig
from streamrl_operator.kube.client import Client
from streamrl_operator.kube.cluster import CachedCluster
from streamrl_operator.kube.kinds import CHILDREN, POD_GROUPS, RLJOB, TLS_ROUTE, WORKLOAD
from streamrl_operator.leader import Leader, LeaseLostError
from streamrl_operator.metrics import OperatorMetrics, serve_endpoints
from streamrl_operator.reconcile import Reconciler
from streamrl_operator.settings import OperatorSettings, from_environment
from streamrl_operator.work_queue import WorkQueue

LEASE_NAME = "streamrl-operator"

log = logging.getLogger(__name__)


def main() -> int:
    """Run until told to end; the exit code."""
    try:
        settings = from_environment()
        begin_logs(settings.log_level)
        asyncio.run(_serve(settings))
    except UserError as error:
        say(f"streamrl_operator: {error}")
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
    metrics, clock = OperatorMetrics(), OperatorClock()
    async with Client(kubeconfig.find(settings.kubeconfig), count=metrics.requested) as client:
        controller = _controller(settings, client=client, metrics=metrics, clock=clock)
        leader = Leader(
            client=client,
            namespace=settings.planning.namespace,
            name=LEASE_NAME,
            me=settings.identity,
            lease_settings=settings.lease_settings,
            clock=clock,
            leading=metrics.leading,
        )

        def unready() -> str:
            return controller.cluster.cache_sync.unready() if leader.is_leading else leader.unled()

        async with serve_endpoints(host=settings.host, port=settings.port, metrics=metrics, unready=unready) as port:
            log.info("started", extra={"port": port, "identity": settings.identity, "server": client.access.server})
            await _until(stop, asyncio.create_task(leader.lead(controller.run), name="lead"))
    log.info("ended")


def _controller(
    settings: OperatorSettings, *, client: Client, metrics: OperatorMetrics, clock: OperatorClock
) -> Controller:
    queue, workers = WorkQueue(clock=clock.monotonic), asyncio.Semaphore(WORKERS)

    def reported(namespace: str, is_whole: bool) -> None:  # noqa: FBT001 - as it is told
        metrics.seen(namespace, is_whole)
        if not is_whole:
            cluster.doubt(namespace)  # kopf would go on asking there

    optional = {WORKLOAD: settings.kueue, TLS_ROUTE: settings.clusters} | dict.fromkeys(
        POD_GROUPS.values(), settings.gangs
    )
    kinds = (RLJOB, *CHILDREN, *(kind for kind, is_followed in optional.items() if is_followed))
    cluster = CachedCluster(client, queue.add, namespaces=settings.planning.namespaces, kinds=kinds, reported=reported)
    metrics.read("operator_queue_depth", queue.depth)
    metrics.read("operator_objects", lambda: sum(cluster.counts().values()))
    metrics.read("operator_cache_stale_seconds", cluster.stale_s)
    metrics.read("operator_kopf_restarts", lambda: sum(watch.restarts for watch in cluster.job_watches.values()))
    members = None
    if settings.clusters:
        members = Members(
            home=cluster, queue=queue, namespace=settings.planning.namespace, clock=clock, count=metrics.requested
        )
        metrics.read("operator_cluster_connected", members.connected)
    reconciler = Reconciler(
        cluster=cluster,
        members=members,
        events=Events(client=client, clock=clock, instance=settings.identity),
        settings=settings.planning,
        lives=settings.lives,
        clock=clock,
        aside=lambda: aside(workers),
        metrics=metrics,
    )
    metrics.read("operator_unreachable_jobs", reconciler.unreachable)
    return Controller(
        members=members, cluster=cluster, reconciler=reconciler, queue=queue, workers=workers, metrics=metrics
    )


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


_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_MAX_CHARS = 2000


class JsonFormatter(logging.Formatter):
    """time, level, logger, message, and what the caller gave as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name.removeprefix("streamrl_operator."),
            "message": record.getMessage()[:_MAX_CHARS],
        }
        line |= {key: value for key, value in vars(record).items() if key not in _OWN}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # ASCII: what a terminal acts on is escaped


def begin_logs(level: str) -> None:
    """All logs of this process, from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # kopf would say of each event that it was handled, that it takes no signals outside of the main thread, and what ended it, with a trace:
    # the first two are as they should be, the third is told where it is begun again (job_watch.py).
    for name in ("activities", "objects", "_core.engines", "_core.reactor.orchestration", "_core.reactor.running"):
        logging.getLogger(f"kopf.{name}").setLevel(logging.CRITICAL)
