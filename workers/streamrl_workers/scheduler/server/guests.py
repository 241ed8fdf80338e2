"""Parts of the process that not every job uses: traces, trackers, the ranker's process, agents in pods of their own.

Each joins by the same doors: effects that it carries out or watches, results and peers' events that it watches (`Executor`, `Connections`), what
it adds to the pages (`StatusPart`), and a loop. A part that a job does not use stands on the pages with zeros, so their key set is stable.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from streamrl.spec import RLJob
from streamrl_workers.plugins.load import LoadedPlugin, load_at
from streamrl_workers.process.silences import silence_warnings
from streamrl_workers.ranker.folder import check_ranker
from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.lengths.status import length_status
from streamrl_workers.scheduler.records import Dropped, Recovered
from streamrl_workers.scheduler.server.connections import Connections
from streamrl_workers.scheduler.server.executor import Executor
from streamrl_workers.scheduler.server.lifetime import ProcessExit
from streamrl_workers.scheduler.server.ranker_client import RankerClient, RankerStatus
from streamrl_workers.scheduler.server.status_endpoint import StatusEndpoint, StatusPart
from streamrl_workers.scheduler.server.tracker_clients import TrackerClients
from streamrl_workers.scheduler.settings import SchedulerEnvironment
from streamrl_workers.scheduler.traces.tracer import Tracer, make_tracer
from streamrl_workers.tasks.agent_hosts import AgentHosts
from streamrl_workers.trackers.registry import check_trackers


class Guests:
    """The parts of one job."""

    def __init__(self, environment: SchedulerEnvironment, *, job: RLJob, recovered: Recovered) -> None:
        self._environment = environment
        self._job = job
        self._ranker = None if recovered.ended else job.spec.scheduling.ranker
        self._tracer = make_tracer(job, run_dir=environment.run_dir, recovered=recovered)
        self._trackers = TrackerClients(
            job, run_dir=environment.run_dir, store_dir=environment.store_dir, plugin_dir=environment.plugin_dir
        )
        self.dispatch_policy: LoadedPlugin | None = None
        """The user's own, once it is checked; None: the job names none."""

    def check(self) -> None:
        """Refuse what cannot be used, before anything is started.

        Raises:
            UserError, UserErrors: the ranker's folder, a tracker's package or the dispatch policy cannot be used.
        """
        check_ranker(self._ranker, base_dir=self._environment.code_dir)
        check_trackers(self._job.spec.trackers)
        self.dispatch_policy = load_at(
            self._job.spec, "scheduling.dispatch.python", directory=self._environment.plugin_dir
        )

    def join(
        self,
        executor: Executor,
        *,
        core: Core,
        connections: Connections,
        status: StatusEndpoint,
        agent_hosts: AgentHosts | None,
    ) -> Mapping[str, Coroutine[Any, Any, None]]:
        """Connect all parts, before the first event; return their loops by name."""
        ranker = RankerClient(
            self._ranker,
            base_dir=self._environment.code_dir,
            run_dir=self._environment.run_dir,
            on_scores=lambda scores: executor.call(core.prompts_ranked, scores),
        )
        executor.carry_out({fx.AskRanker: ranker.ask})
        watch_drops(executor, agent_hosts)
        if self._tracer is not None:
            executor.watch(self._tracer.effects, result=self._tracer.result)
            connections.on_event = self._tracer.event
        status.parts = status_parts(
            ranker=ranker.status, tracer=self._tracer, trackers=self._trackers, agent_hosts=agent_hosts
        )
        return {"ranker process": ranker.run()}

    def start(self) -> None:
        """Start the trackers' processes, once the run has begun."""
        self._trackers.start()

    async def end(self, ending: ProcessExit | None) -> None:
        """Tell the trackers how the run ended; None: end their processes at once."""
        await self._trackers.end(ending)

    async def close(self) -> None:
        """Send the traces that wait, once nothing happens any more."""
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)


def watch_drops(executor: Executor, hosts: AgentHosts | None) -> None:
    """Have agent hosts forget the samples of dropped groups."""

    def forget(effect: fx.Write) -> None:
        if hosts is not None and isinstance(effect.record, Dropped):
            hosts.forget_group(effect.record.group_id)

    executor.watch({fx.Write: forget})


def status_parts(
    *,
    ranker: Callable[[], RankerStatus] = RankerStatus,
    tracer: Tracer | None = None,
    trackers: TrackerClients | None = None,
    agent_hosts: AgentHosts | None = None,
) -> Sequence[StatusPart]:
    """Return what the parts of a job add to the pages."""
    sent_and_lost: Callable[[], tuple[int, int]] = (lambda: (0, 0)) if tracer is None else tracer.spans
    return (
        StatusPart(
            # lengths.ranker: of its process (state `none`: there is none), its ends, prompts waiting, scored and dropped, pairs remembered,
            # rounds of tuning, cpu_s used
            status=lambda view: {"lengths": length_status(view.lengths) | {"ranker": asdict(ranker())}},
            metrics=lambda metrics, view: metrics.lengths(view.lengths, ranker()),
        ),
        StatusPart(
            status=lambda _: {"agents": None if agent_hosts is None else dict(agent_hosts.numbers)},
            warnings=lambda: [] if agent_hosts is None else silence_warnings(agent_hosts.silences()),
            metrics=lambda metrics, _: metrics.agents(agent_hosts),
        ),
        StatusPart(
            status=lambda _: {"trackers": {} if trackers is None else trackers.status()},
            warnings=lambda: [] if trackers is None else trackers.warnings(),
        ),
        StatusPart(metrics=lambda metrics, _: metrics.spans(*sent_and_lost())),
    )
