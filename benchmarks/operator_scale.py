"""One operator, many RLJobs, on a real control plane with fake nodes and pods (KWOK).

```
  etcd, kube-apiserver, controller manager, scheduler, kwok ── all real but the nodes and what runs in the pods
    namespace `bare`      before and after: the objects of some jobs, applied by a bare loop        scale_bare.py
    namespace `operated`  the jobs, created at once, brought about by one operator process          tests/cluster/operators.py
  the pods' and Services' addresses are this process's own: one server answers for every scheduler       scale_network.py
```
`python benchmarks/operator_scale.py --jobs 1000 --pools 4`. Needs the programs of `tests/cluster` (built at the first start), `unshare`
and `ip`. Story: bare loop; create all jobs and wait until each says Ready; nothing for a while (the steady state), then the same without
an operator and with those of `--others`; the operator is started again; it ends; bare loop again. Requests are counted in the API server's
audit log, not by the operator.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent / "operator"), str(ROOT / "tests")]

import scale_bare as bare  # noqa: E402 - found by the line above
import scale_counts as counts  # noqa: E402
import scale_network as network  # noqa: E402

from cluster.harness import kwok, tools  # noqa: E402
from cluster.harness.audit import Use  # noqa: E402
from cluster.harness.control_plane import ControlPlane  # noqa: E402
from cluster.harness.flags import Settings  # noqa: E402
from cluster.harness.processes import ClusterError  # noqa: E402
from cluster.operators import MADE, USER, Operator  # noqa: E402
from streamrl import keys  # noqa: E402
from streamrl_operator.kube.kinds import POD, RLJOB  # noqa: E402
from streamrl_operator.planning.values import PlanningSettings as Planning  # noqa: E402
from support.jobs import simulated_job  # noqa: E402

OPERATED, BARE = "operated", "bare"
PODS_A_NODE = 200
"""Below the 254 addresses that a node is given."""
RESYNC_S, LEASE_S = 30.0, 60.0
"""The operator's own default, where the cluster tests have less; and a Lease that is not lost where other programs take the cores."""
QUIET_S = 35.0
"""Between "every job is Ready" and the steady window: one refresh of each job is over."""
_DEADLINE_A_JOB_S, _LEAST_DEADLINE_S = 6.0, 300.0
_LOOK_S, _LOOK_A_JOB_S = 2.0, 0.01
"""Between two looks of the benchmark: a list of a thousand jobs is some ten megabytes, and a load of its own."""
_TRAINERS = 1
_PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kwok")
_PLANNING = Planning(namespace=OPERATED, trainer_image="trainer:test", generator_image="generator:test")
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the control plane is given."""

    jobs: int
    pools: int
    bare_jobs: int
    """Of each of the two bare loops."""
    steady_s: float
    nodes: int
    pods: network.Pods
    numbers: str
    """Where the operator asks for them."""
    resync_s: float = RESYNC_S
    """Least time between two readings of a job: all together have ten a second at most, so 100 jobs with 10 s load as 1,000 do."""
    others: Sequence[str] = ()
    """Trees of other commits, whose operators have the same jobs at rest."""

    @property
    def deadline_s(self) -> float:
        """For a phase that handles every job."""
        return _LEAST_DEADLINE_S + _DEADLINE_A_JOB_S * self.jobs

    @property
    def look_s(self) -> float:
        """Between two looks at all of them."""
        return max(_LOOK_S, _LOOK_A_JOB_S * self.jobs)


@dataclass(slots=True, kw_only=True)
class Run:
    """One run, and what was noted in it."""

    load: Load
    plane: ControlPlane
    operator: Operator
    server: bare.Server
    marks: dict[str, str] = field(default_factory=dict)
    """Event -> moment, as the audit log has it."""
    used: dict[str, dict[str, counts.Usage]] = field(default_factory=dict)
    """Event -> process -> what it had used."""
    looks: dict[str, counts.Histogram] = field(default_factory=dict)
    bare_rates: list[float] = field(default_factory=list)
    bare_cpu_s: list[float] = field(default_factory=list)
    """Of one job, loop and control plane, until its pods run: on a shared machine a better measure than rates."""
    bare_objects: int = 0
    """Of one job."""

    def mark(self, event: str) -> None:
        """Note the time and what every process has used so far."""
        self.marks[event] = counts.moment()
        pids = {name: server.pid for name, server in self.plane.servers.items()} | {"benchmark": os.getpid()}
        if self.operator.runs:
            pids["operator"] = counts.child("streamrl_operator")
            self.looks[event] = counts.histogram(
                self.operator.page("metrics")[1], "streamrl_operator_reconcile_seconds"
            )
        self.used[event] = {name: counts.usage(pid) for name, pid in pids.items()}
        print(f"[{self.marks[event][11:19]}] {event}", flush=True)

    def cpu_s(self, begin: str, end: str, *, only: Sequence[str]) -> float:
        """CPU seconds that some processes used between two marks."""
        return sum(self.used[end][name].cpu_s - self.used[begin][name].cpu_s for name in only)


def document(name: str, *, pools: int) -> dict[str, Any]:
    """A job with so many pools of one generator each."""
    made = simulated_job(replicas=1)
    made["metadata"]["name"] = name
    pool = made["spec"]["generators"][0]
    made["spec"]["generators"] = [pool | {"name": f"pool-{number}"} for number in range(pools)]
    return made


def names_of(count: int, *, begin: int = 0) -> list[str]:
    """Names of jobs."""
    return [f"job-{number:04}" for number in range(begin, begin + count)]


async def until(check: Callable[[], Any], what: str, *, deadline_s: float, every_s: float) -> None:
    """Wait for a condition; `check` gives an awaitable bool."""
    end_s = time.monotonic() + deadline_s
    while not await _holds(check):
        if time.monotonic() > end_s:
            raise ClusterError(f"waited {deadline_s:g} s for {what}")
        await asyncio.sleep(every_s)


async def _holds(check: Callable[[], Any]) -> bool:
    """Whether it does; an API server too busy to say is asked again."""
    try:
        return bool(await check())
    except bare.RequestRefusedError as error:
        if not error.is_busy:
            raise
        return False


async def pods_run(run: Run, namespace: str, wanted: int) -> bool:
    """Whether so many pods run. From the API server's cache, and names only: to look must not be a load."""
    path = f"{POD.path(namespace)}?fieldSelector=status.phase%3DRunning&resourceVersion=0"
    found = json.loads(await run.server.ask("GET", path, Accept=_METADATA_ONLY))["items"] or ()
    return len(found) >= wanted


async def jobs_ready(run: Run) -> bool:
    """Whether every job says that it is Ready.

    Raises:
        ClusterError: there is no operator that could say so.
    """
    if not run.operator.runs:
        raise ClusterError(f"the operator has ended; end of its log:\n{run.operator.tail()}")
    found = json.loads(await run.server.ask("GET", f"{RLJOB.path(OPERATED)}?resourceVersion=0"))["items"]
    conditions = [
        {each["type"]: each["status"] for each in job.get("status", {}).get("conditions", [])} for job in found
    ]
    return sum(each.get("Ready") == "True" for each in conditions) >= run.load.jobs


async def namespaces(load: Load, server: bare.Server) -> None:
    """Two namespaces with a volume for every claim that will be made in them."""
    for name in (OPERATED, BARE):
        await server.ask("POST", "/api/v1/namespaces", json.dumps({"metadata": {"name": name}}).encode())
    claims = [
        volume
        for namespace, count in ((OPERATED, load.jobs), (BARE, 2 * load.bare_jobs))
        for job in names_of(count)
        for volume in bare.volumes(job, namespace=namespace)
    ]

    async def create(volume: dict[str, Any]) -> None:
        await server.ask("POST", "/api/v1/persistentvolumes", json.dumps(volume).encode())

    await bare.each(claims, create)


async def bare_loop(run: Run, *, begin: int) -> None:
    """The objects of some jobs by the bare loop; then wait until their pods run. The jobs are there before: they own the objects."""
    load = run.load
    documents = [document(name, pools=load.pools) for name in names_of(load.bare_jobs, begin=begin)]
    stored = await bare.create_jobs(run.server, documents, namespace=BARE)
    writes = [bare.writes_of(each, _PLANNING) for each in stored]
    run.bare_objects = len(writes[0])
    run.mark(f"bare loop {begin} begins")
    took_s = await bare.apply_jobs(run.server, writes)
    run.mark(f"bare loop {begin} ends")
    run.bare_rates.append(sum(map(len, writes)) / took_s)
    client_s = run.cpu_s(f"bare loop {begin} begins", f"bare loop {begin} ends", only=("benchmark",))
    pods = (begin + load.bare_jobs) * (load.pools + _TRAINERS)
    await until(lambda: pods_run(run, BARE, pods), f"{pods} bare pods", deadline_s=load.deadline_s, every_s=load.look_s)
    run.mark(f"bare pods {begin} run")
    servers_s = run.cpu_s(f"bare loop {begin} begins", f"bare pods {begin} run", only=tuple(run.plane.servers))
    run.bare_cpu_s.append((client_s + servers_s) / load.bare_jobs)


async def operated(run: Run) -> None:
    """All jobs at once, by one operator; its steady state; its start with all of them there."""
    load = run.load
    run.operator.start()
    await _leads(run)
    run.mark("create")
    await bare.create_jobs(
        run.server, [document(name, pools=load.pools) for name in names_of(load.jobs)], namespace=OPERATED
    )
    run.mark("created")
    await _until_ready(run)
    report_created(run)
    await asyncio.sleep(QUIET_S)
    run.mark("steady")
    await asyncio.sleep(load.steady_s)
    run.mark("steady ends")
    report_steady(run)
    run.operator.stop()
    await _other_operators(run)
    run.mark("restart")
    run.operator.start()
    await _leads(run)
    run.mark("restarted leads")
    reconciled = run.operator.metric
    await until(
        lambda: asyncio.to_thread(lambda: reconciled("streamrl_operator_reconciles_total") >= load.jobs),
        "a look at every job",
        deadline_s=load.deadline_s,
        every_s=0.2,
    )
    run.mark("restarted looked")
    report_restart(run)
    run.operator.stop()


async def _other_operators(run: Run) -> None:
    """The steady state without an operator, and with those of other trees: what each of them costs of the same jobs."""
    own = run.operator
    for tree in ("", *run.load.others):
        if tree:
            path = os.pathsep.join(f"{tree}/{part}" for part in ("crds", "operator", "pages"))
            run.operator = own.but(PYTHONPATH=path).start()
            await _leads(run)
            await asyncio.sleep(QUIET_S + run.load.jobs * _LOOK_A_JOB_S * QUIET_S)
        begin, end = (f"{event} with {tree or 'no operator'}" for event in ("steady", "steady ends"))
        run.mark(begin)
        await asyncio.sleep(run.load.steady_s)
        run.mark(end)
        _print_cpu(run, (end.removeprefix("steady ends "), begin, end))
        if tree:
            run.operator.stop()
    run.operator = own


async def _until_ready(run: Run) -> None:
    """Until every job is; what was measured is told also where that does not come."""
    try:
        load = run.load
        await until(lambda: jobs_ready(run), f"{load.jobs} jobs Ready", deadline_s=load.deadline_s, every_s=load.look_s)
    except ClusterError:
        if run.operator.runs:
            run.mark("ready")
            report_created(run, all_ready=False)
        raise
    run.mark("ready")


async def _leads(run: Run) -> None:
    await asyncio.to_thread(run.operator.wait_until_leading, deadline_s=run.load.deadline_s)


def report_created(run: Run, *, all_ready: bool = True) -> None:
    """Print what the create phase took, beside the bare loops that have run."""
    load, marks = run.load, run.marks
    phase = counts.between(run.plane.uses(USER), marks["create"], marks["ready"])
    made = [use for use in phase if counts.is_made(use, MADE)]
    last = max(use.at for use in made)
    took_s = counts.seconds(marks["create"], last)
    writes = [use for use in phase if counts.is_write(use) and use.at <= last]
    rate, objects_rate = len(writes) / took_s, len(made) / took_s
    bare_rate = sum(run.bare_rates) / len(run.bare_rates)
    quarters = counts.rates([use.at for use in made], begin=marks["create"], parts=4)
    first, final = run.used["create"]["operator"], run.used["ready"]["operator"]
    print(
        f"\n{load.jobs} jobs x {load.pools} pools, {run.bare_objects} objects a job, {load.nodes} nodes;"
        f" schedulers {load.pods}, asked at the {load.numbers}"
    )
    print(f"bare loops: {', '.join(f'{each:.0f}' for each in run.bare_rates)} applies/s")
    print(f"operator: {len(writes)} writes in {took_s:.0f} s = {rate:.0f} writes/s, ratio {rate / bare_rate:.2f}")
    print(f"          {len(made)} objects made = {objects_rate:.0f}/s, ratio {objects_rate / bare_rate:.2f};", end=" ")
    print(f"by quarters of the objects {', '.join(f'{each:.0f}' for each in quarters)}")
    ready = "every job Ready after" if all_ready else "NOT every job Ready after"
    print(f"          {ready} {counts.seconds(marks['create'], marks['ready']):.0f} s")
    print(f"          CPU {1e3 * (final.cpu_s - first.cpu_s) / len(writes):.1f} ms a write, RSS {final.rss_mb:.0f} MB")
    cpu_s = run.cpu_s("create", "ready", only=(*run.plane.servers, "operator")) / load.jobs
    bare_cpu_s = sum(run.bare_cpu_s) / len(run.bare_cpu_s)
    print(f"CPU of control plane and client until the pods of a job run: bare loop {bare_cpu_s:.2f} s,", end=" ")
    print(f"operator {cpu_s:.2f} s a job, ratio {bare_cpu_s / cpu_s:.2f}")
    _print_looks(run, "create", "ready")
    _print_requests("create phase (until every job is Ready)", phase, jobs=load.jobs)


def report_steady(run: Run) -> None:
    """Print what the steady state took."""
    rest = run.used["steady ends"]["operator"]
    window = counts.between(run.plane.uses(USER), run.marks["steady"], run.marks["steady ends"])
    rate = len(window) / run.load.steady_s
    _print_requests(f"steady state, {run.load.steady_s:g} s, {rate:.1f} requests/s", window, jobs=run.load.jobs)
    _print_looks(run, "steady", "steady ends")
    print(f"operator RSS: {rest.rss_mb:.0f} MB at rest, peak {rest.peak_mb:.0f} MB")
    _print_cpu(run, ("create to Ready", "create", "ready"), ("steady", "steady", "steady ends"))


def report_restart(run: Run) -> None:
    """Print what a start with all jobs there took."""
    marks, peak_mb = run.marks, run.used["restarted looked"]["operator"].peak_mb
    again = counts.between(run.plane.uses(USER), marks["restart"], marks["restarted looked"])
    leads_s = counts.seconds(marks["restart"], marks["restarted leads"])
    looked_s = counts.seconds(marks["restart"], marks["restarted looked"])
    print(f"\nstarted again: whole caches after {leads_s:.1f} s, every job looked at after {looked_s:.1f} s,", end=" ")
    print(f"{len(again)} requests, {sum(map(counts.is_write, again))} writes, peak {peak_mb:.0f} MB\n", flush=True)


def _print_looks(run: Run, begin: str, end: str) -> None:
    first, final = run.looks[begin], run.looks[end]
    count = max(final.values()) - max(first.values())
    shares = [1e3 * counts.quantile(final, first, share) for share in (0.5, 0.99)]
    print(f"{count:.0f} looks, p50 {shares[0]:.0f} ms, p99 {shares[1]:.0f} ms (the histogram ends at 10 s)", flush=True)


def _print_requests(title: str, uses: Sequence[Use], *, jobs: int) -> None:
    print(f"\n{title}: {len(uses)} requests, {len(uses) / jobs:.1f} a job\n")
    print("| verb | resource | requests | a job |\n|---|---|---|---|")
    for verb, resource, count, share in counts.table(uses, per=jobs):
        print(f"| {verb} | {resource} | {count} | {share:.2f} |")


def _print_cpu(run: Run, *spans: tuple[str, str, str]) -> None:
    """`spans`: title, and the marks of its begin and end. Of each process that is there at both."""
    processes = run.used[spans[0][2]]
    print("\n| CPU seconds (share of one core) | " + " | ".join(processes) + " |")
    print("|---" * (1 + len(processes)) + "|")
    for title, begin, end in spans:
        took_s = counts.seconds(run.marks[begin], run.marks[end])
        spent = [run.used[end][name].cpu_s - run.used[begin][name].cpu_s for name in processes]
        print(
            f"| {title}, {took_s:.0f} s | " + " | ".join(f"{each:.0f} ({each / took_s:.1%})" for each in spent) + " |"
        )
    print("| peak MB | " + " | ".join(f"{each.peak_mb:.0f}" for each in processes.values()) + " |", flush=True)


async def measure(load: Load) -> None:
    """The whole story on a control plane of its own."""
    numbers = network.Numbers() if load.pods == "answer" else None
    with ControlPlane(Settings(scheduler=True)) as plane:
        plane.apply_crds()
        fakes = kwok.start(plane, nodes=load.nodes)
        plane.servers["kwok"] = fakes
        environ = {
            keys.ENV_RESYNC_SECONDS: str(load.resync_s),
            keys.ENV_LEASE_SECONDS: str(LEASE_S),
            keys.ENV_NUMBERS: load.numbers,
        }
        async with bare.connect(plane.kubeconfig) as server:
            await namespaces(load, server)
            run = Run(load=load, plane=plane, operator=Operator(plane, OPERATED, **environ), server=server)
            try:
                await bare_loop(run, begin=0)
                await operated(run)
                await bare_loop(run, begin=load.bare_jobs)
            finally:
                if run.operator.runs:
                    run.operator.stop(kill=True)
            report_created(run)
            if numbers is not None:
                print(f"\nnumbers pages served: {numbers.asked}")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--pools", type=int, default=4)
    parser.add_argument("--bare-jobs", type=int, help="of each of the two bare loops (a fifth of the jobs)")
    parser.add_argument("--nodes", type=int, help="fake nodes (as many as the pods need)")
    parser.add_argument("--steady-s", type=float, default=300.0, help="seconds of the steady window")
    parser.add_argument("--resync-s", type=float, default=RESYNC_S, help="least time between two readings of a job")
    parser.add_argument("--pods", choices=("answer", "refuse", "silent"), default="answer", help="the fake schedulers")
    parser.add_argument("--numbers", choices=("Service", "Proxy"), default="Service", help="where they are asked for")
    parser.add_argument(
        "--others", nargs="*", default=(), help="trees of other commits, for the steady state of the same jobs"
    )
    given = parser.parse_args()
    for name in _PROGRAMS:
        tools.tool(name)  # built before we leave the network from which they are made
    network.enter(given.pods)
    bare_jobs = given.bare_jobs or max(1, given.jobs // 5)
    pods = (given.jobs + 2 * bare_jobs) * (given.pools + _TRAINERS)
    load = Load(
        jobs=given.jobs,
        pools=given.pools,
        bare_jobs=bare_jobs,
        steady_s=given.steady_s,
        nodes=given.nodes or -(-pods // PODS_A_NODE),
        pods=given.pods,
        numbers=given.numbers,
        resync_s=given.resync_s,
        others=given.others,
    )
    asyncio.run(measure(load))


if __name__ == "__main__":
    main()
