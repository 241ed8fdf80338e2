"""One namespace of the cluster with a node, as the person sees it who runs jobs there; what a failure needs is in its message.

Owns waits, what a failed wait shows, and the proof by the journal on the volume. Extends `Lab`, which speaks with the API server.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from cluster.harness.cluster import NodeCluster
from cluster.harness.processes import ClusterError, wait_until
from cluster.operators import Lab
from streamrl import keys, names

RUN_S = 180.0
"""A job of simulated engines, on a machine that does other things beside it: its pods alone take half a minute to start."""
SOON_S = 90.0
CHECK_S = 120.0
LOG_LINES = 12
Object = dict[str, Any]


class Stage(Lab):
    """A namespace whose jobs have pods."""

    def __init__(self, cluster: NodeCluster, namespace: str) -> None:
        super().__init__(cluster, namespace)
        self.nodes = cluster

    # ---- what a person does

    def apply(self, *documents: Object) -> None:
        """`kubectl apply` them."""
        for document in documents:
            self.kubectl("apply", "-f", "-", stdin=json.dumps(document))

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """kubectl in this namespace; what it printed."""
        done = self.cluster.kubectl("--namespace", self.namespace, *arguments, stdin=stdin, check=check)
        return done.stdout + ("" if check else done.stderr)

    def change(self, job: str, **spec: Any) -> None:
        """Merge a change into a job's spec."""
        self.patch("rljobs", job, {"spec": spec})

    # ---- what a person sees

    def status(self, job: str) -> Object:
        """Status of a job; empty while there is none."""
        status: Object = (self.get("rljobs", job) or {}).get("status", {})
        return status

    def pool(self, job: str, pool: str) -> Object:
        """A GeneratorPool."""
        return self.must("generatorpools", names.pool(job, pool))

    def pods(self, job: str) -> dict[str, Object]:
        """Pods of a job by name."""
        found = self.list("pods")
        mine = [pod for pod in found if pod["metadata"].get("labels", {}).get(names.LABEL_JOB) == job]
        return {pod["metadata"]["name"]: pod for pod in mine}

    def page(self, job: str) -> Object:
        """The scheduler's numbers, through the API server's proxy as the operator reads them; empty while nobody answers."""
        service = f"http:{names.scheduler(job)}:{names.PORT_NAME_SIGNALS}"
        answer = self.cluster.api.get(f"{self.path('services', service, 'proxy')}/numbers")
        return answer.body if answer.ok and "step" in answer.body else {}

    def ready_generators(self, job: str) -> int:
        """Generators whose pods are ready."""
        return sum(_is_ready(pod) for name, pod in self.pods(job).items() if name != f"{names.trainer(job)}-0")

    # ---- volumes, as this machine has them

    def run_dir(self, job: str) -> Path:
        """The journal's volume."""
        return self.nodes.the_node.volume_path(self.namespace, names.journal_claim(job))

    def store(self, job: str, *, uid: str) -> Path:
        """The job's directory on the checkpoints' volume."""
        volume = self.nodes.the_node.volume_path(self.namespace, names.checkpoints_claim(job))
        return volume / Path(names.store_dir(job, uid=uid)).relative_to(names.DIR_STORE_VOLUME)

    def steps(self, job: str) -> int:
        """Steps that the journal's volume knows: also without an API server, where `run_dir` was asked for before."""
        return count_steps(self.run_dir(job))

    def rewards(self, job: str) -> list[float]:
        """Held-out rewards in the order of their steps."""
        lines = (self.run_dir(job) / keys.DIR_METRICS / "evaluations.jsonl").read_text().splitlines()
        return [float(json.loads(line)["mean_reward"]) for line in lines]

    def uid(self, job: str) -> str:
        """Of a job."""
        return str(self.must("rljobs", job)["metadata"]["uid"])

    def assert_exact(self, job: str, *, at: "Stage | None" = None) -> str:
        """`streamrl journal check` on the volumes: no group lost, none trained twice. `at`: where they are, in a member; None: here."""
        volumes = at or self
        store = volumes.store(job, uid=self.uid(job))
        done = subprocess.run(
            [sys.executable, "-m", "streamrl_cli.main", "journal", "check", str(volumes.run_dir(job))],
            env=os.environ | {keys.ENV_STORE_DIR: str(store)},
            capture_output=True,
            text=True,
            timeout=CHECK_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.explain(job)}"
        return done.stdout

    # ---- waits

    def wait_for(
        self, check: Callable[[], Any], what: str, *, job: str, deadline_s: float = SOON_S, ended: bool = False
    ) -> None:
        """Wait for a condition of a job that goes on; one that has failed is told at once, with why. `ended`: it need not go on."""

        def look() -> bool:
            if check():
                return True
            failed = self.condition(job, "Failed")
            if failed.get("status") == "True":
                raise ClusterError(f"{job} failed before {what}: {failed['reason']} {failed['message']}")
            if not ended and self.status(job).get("completionTime") and not self.pods(job) and not check():
                raise ClusterError(f"{job} has ended before {what}")
            return False

        try:
            wait_until(look, what=what, deadline_s=deadline_s)
        except ClusterError as error:
            raise AssertionError(f"{error}\n{self.explain(job)}") from None

    def wait_step(self, job: str, step: int, *, deadline_s: float = RUN_S) -> None:
        """Until so many steps are done, by the scheduler's own numbers."""
        self.wait_for(lambda: self.page(job).get("step", 0) >= step, f"step {step}", job=job, deadline_s=deadline_s)

    def wait_measured(
        self, job: str, pools: Iterable[str], *, deadline_s: float = RUN_S
    ) -> dict[str, dict[str, float]]:
        """Until the dispatcher has measured the speed of these pools; pool -> active samples -> seconds of a step."""
        speeds: dict[str, dict[str, float]] = {}

        def measured() -> bool:
            found = self.page(job).get("dispatch", {}).get("pools", {})
            speeds.update({name: pool["step_s"] for name, pool in found.items() if pool["speed"] == "known"})
            return speeds.keys() == set(pools)

        self.wait_for(measured, "the speed of all pools to be measured", job=job, deadline_s=deadline_s)
        sys.stderr.write(f"seconds of a step by active samples: {speeds}\n")
        return speeds

    def wait_succeeded(self, job: str, *, deadline_s: float = RUN_S) -> Object:
        """Until the job has succeeded and its pods are gone; its status."""
        self.wait_for(
            lambda: self.condition(job, "Succeeded").get("status") == "True",
            f"{job} to succeed",
            job=job,
            deadline_s=deadline_s,
        )
        self.wait_for(lambda: not self.pods(job), f"the pods of {job} to be gone", job=job)
        return self.status(job)

    # ---- why it went wrong

    def explain(self, job: str) -> str:
        """Conditions, pods, events and the ends of all logs, short."""
        parts = [f"conditions: {_told(self.status(job).get('conditions', []))}"]
        parts.append(self.kubectl("get", "pods", "-o", "wide", check=False))
        for name, pod in self.pods(job).items():
            parts += list(self._containers(name, pod))
        events = self.kubectl("get", "events", "--sort-by=.lastTimestamp", check=False)
        parts.append("\n".join(events.splitlines()[-25:]))
        return "\n".join(parts)

    def _containers(self, name: str, pod: Object) -> Iterable[str]:
        status = pod.get("status", {})
        for one in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
            yield f"--- {name} {one['name']} restarts={one['restartCount']} state={json.dumps(one['state'])[:300]}"
            if one["restartCount"]:
                yield self._log(name, one["name"], "--previous")
            yield self._log(name, one["name"])

    def _log(self, pod: str, container: str, *more: str) -> str:
        return self.kubectl("logs", pod, "-c", container, f"--tail={LOG_LINES}", *more, check=False)

    def close(self) -> None:
        """Delete all jobs and wait until nothing of them runs: the next test has the machine for itself."""
        for job in self.list("rljobs"):
            self.cluster.api.delete(self.path("rljobs", job["metadata"]["name"]))
        wait_until(lambda: not self.list("rljobs"), what=f"jobs of {self.namespace} to be gone", deadline_s=SOON_S)
        wait_until(lambda: not self.list("pods"), what=f"pods of {self.namespace} to be gone", deadline_s=2 * SOON_S)


def count_steps(run_dir: Path) -> int:
    """Steps recorded in a run folder."""
    file = run_dir / keys.DIR_METRICS / "steps.jsonl"
    lines = (
        [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.exists() else []
    )
    return max((int(json.loads(line)["step"]) + 1 for line in lines), default=0)


def restarts_of(pod: Mapping[str, Any]) -> dict[str, int]:
    """Container -> how often the kubelet has started it again."""
    status = pod.get("status", {})
    every = (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
    return {one["name"]: int(one["restartCount"]) for one in every}


def container_id(pod: Mapping[str, Any], container: str) -> str:
    """The runtime's id of a container that runs."""
    status = pod["status"]
    every = (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
    (found,) = (one for one in every if one["name"] == container)
    return str(found["containerID"]).rpartition("/")[2]


def _is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _told(conditions: Iterable[Mapping[str, Any]]) -> str:
    return "; ".join(f"{one['type']}={one['status']} {one['reason']}: {one['message'][:200]}" for one in conditions)
