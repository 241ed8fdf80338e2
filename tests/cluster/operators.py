"""The operator as a real process against a test cluster, and what a test asks about it."""

import copy
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx

from cluster import rights
from cluster.harness import reaper
from cluster.harness.api import GROUP
from cluster.harness.base import Cluster
from cluster.harness.control_plane import ControlPlane
from cluster.harness.processes import ClusterError, tail, wait_until
from streamrl import keys
from support.ports import free_port

USER = "streamrl-operator-under-test"
RESYNC_S = 2.0
SOON_S = 60.0
"""What the operator does in a fraction of a second, on a machine that builds something else beside it."""
PAGE_S, END_S = 30.0, 120.0
"""For an answer of its pages, and for its end."""
LEASE_S = 30.0
"""An operator that is not heard for two thirds of it ends, as it should: longer than a busy machine stands still, shorter than `SOON_S`."""
WRITES = ("create", "update", "patch", "delete", "deletecollection")
_PATHS = {
    "serviceaccounts": "/api/v1",
    "configmaps": "/api/v1",
    "secrets": "/api/v1",
    "services": "/api/v1",
    "pods": "/api/v1",
    "persistentvolumeclaims": "/api/v1",
    "networkpolicies": "/apis/networking.k8s.io/v1",
    "poddisruptionbudgets": "/apis/policy/v1",
    "statefulsets": "/apis/apps/v1",
    "generatorpools": GROUP,
    "rljobs": GROUP,
    "rljobdefaults": GROUP,
    "leases": "/apis/coordination.k8s.io/v1",
    "events": "/apis/events.k8s.io/v1",
    "tlsroutes": "/apis/gateway.networking.k8s.io/v1",
    "rolebindings": "/apis/rbac.authorization.k8s.io/v1",
}
MADE = tuple(
    plural
    for plural in _PATHS
    if plural not in ("pods", "rljobs", "rljobdefaults", "leases", "events", "rolebindings", "tlsroutes")
)
"""Kinds that the operator makes for a job."""


class Operator:
    """One process of the operator that looks after one namespace, with the rights that the chart gives it; another `user` has its own."""

    def __init__(
        self,
        cluster: ControlPlane,
        namespace: str,
        *,
        name: str = "operator",
        user: str = USER,
        chart: Mapping[str, str] | None = None,
        **environ: str,
    ) -> None:
        self.user = user
        if user == USER:
            rights.grant(cluster.api, user, home=namespace, **(chart or {}))
        self._settings = cluster.settings
        """A cluster with a network namespace of its own has its operator there too."""
        self.port = free_port()
        self.log = cluster.folder / f"{namespace}-{name}.log"
        self._environ = reaper.environment(cluster.mark) | {
            keys.ENV_KUBECONFIG: str(cluster.kubeconfig_for(user)),
            keys.ENV_NAMESPACES: namespace,
            keys.ENV_POD_NAME_OPERATOR: name,
            keys.ENV_POD_NAMESPACE: namespace,
            keys.ENV_TRAINER_IMAGE: "trainer:test",
            keys.ENV_GENERATOR_IMAGE: "generator:test",
            keys.ENV_RESYNC_SECONDS: str(RESYNC_S),
            keys.ENV_NUMBERS: "Proxy",
            keys.ENV_LEASE_SECONDS: str(LEASE_S),
            keys.ENV_SIGNALS_PORT: str(self.port),
            keys.ENV_BIND_HOST: cluster.settings.host,
            **environ,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def but(self, **environ: str) -> Self:
        """Return one that is not started, with other environment variables: it takes the place of this one."""
        other = copy.copy(self)
        other._environ, other._process = self._environ | environ, None
        return other

    def start(self) -> Self:
        """Start it; it may be started again."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._settings.enter, sys.executable, "-m", "streamrl_operator"],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=Path(__file__).parents[2],
            )
        return self

    def stop(self, *, kill: bool = False) -> int:
        """End it; the exit code."""
        assert self._process is not None
        self._process.kill() if kill else self._process.terminate()
        return self._process.wait(END_S)

    def ended(self) -> int:
        """Wait for its end by itself; the exit code."""
        assert self._process is not None
        return self._process.wait(END_S)

    @property
    def runs(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def resident_bytes(self) -> int:
        """Its memory."""
        assert self._process is not None
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def page(self, name: str) -> tuple[int, str]:
        """(status, text) of a page; status 0: nobody answers."""
        try:
            with urllib.request.urlopen(f"http://{self._settings.host}:{self.port}/{name}", timeout=PAGE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metric(self, name: str) -> float:
        """Sum over all labels of one of its metrics; a page that is not to be had is no 0."""
        status, text = self.page("metrics")
        if status != 200:
            raise ClusterError(f"the operator's metrics answered {status}; end of {self.log}:\n{self.tail()}")
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    @property
    def leads(self) -> bool:
        """Whether it acts."""
        return "streamrl_operator_leader 1.0" in self.page("metrics")[1].splitlines()

    def wait_until_leading(self, *, deadline_s: float = LEASE_S + SOON_S) -> "Operator":
        """Until it acts and knows all there is; one that was killed keeps the Lease for its time."""
        wait_until(
            lambda: self.leads and self.page("readyz")[0] == 200,
            what="the operator to lead",
            deadline_s=deadline_s,
            log=self.log,
        )
        return self

    @property
    def looks(self) -> float:
        """At jobs, so far."""
        return self.metric("streamrl_operator_reconciles_total")

    def wait_for_looks(self, count: int = 2, *, since: float | None = None, deadline_s: float = SOON_S) -> None:
        """Until it has looked at jobs so often more: resyncs, where nothing changes. `since`: `looks` before what causes them; else now."""
        begun = self.looks if since is None else since
        wait_until(
            lambda: self.looks >= begun + count,
            what=f"{count} more looks",
            deadline_s=deadline_s,
            log=self.log,
        )

    def tail(self) -> str:
        """End of its log."""
        return tail(self.log, 40)


TRAINER_READY = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
"""Change of a pod, as a kubelet makes it."""


def pods_unsaid(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the pods with ranks of which no kubelet has said anything."""
    return [
        each["metadata"]["name"]
        for each in found
        if str(each["metadata"].get("labels", {}).get("streamrl.io/role")).startswith("trainer")
        and not {"conditions", "containerStatuses"} & each.get("status", {}).keys()
    ]


class Lab:
    """One namespace as the operator's user sees it."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.members: list[Lab] = []
        """Where its jobs may have trainers too."""

    def path(self, plural: str, name: str = "", part: str = "") -> str:
        """Path of a collection, an object, or a part of it."""
        parts = (f"{_PATHS[plural]}/namespaces/{self.namespace}/{plural}", name, part)
        return "/".join(each for each in parts if each)

    def get(self, plural: str, name: str) -> dict[str, Any] | None:
        """One object; None where there is none."""
        answer = self.cluster.api.get(self.path(plural, name))
        return None if answer.code == 404 else answer.expect()

    def must(self, plural: str, name: str) -> dict[str, Any]:
        """One object that is there."""
        return self.cluster.api.get(self.path(plural, name)).expect()

    def list(self, plural: str) -> list[dict[str, Any]]:
        """All of a kind."""
        items: list[dict[str, Any]] = self.cluster.api.get(self.path(plural)).expect()["items"]
        return items

    def create(self, plural: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make an object."""
        return self.cluster.api.create(self.path(plural), body).expect()

    def patch(self, plural: str, name: str, change: Any, *, part: str = "", **options: str) -> dict[str, Any]:
        """Merge a change into an object."""
        return self.cluster.api.patch(self.path(plural, name, part), change, **options).expect()

    def delete(self, plural: str, name: str) -> None:
        """Delete an object."""
        self.cluster.api.delete(self.path(plural, name)).expect()

    def condition(self, job: str, kind: str) -> dict[str, Any]:
        """A condition of a job; empty where there is none."""
        status = (self.get("rljobs", job) or {}).get("status", {})
        return next((each for each in status.get("conditions", []) if each["type"] == kind), {})

    def made(self, job: str) -> dict[str, set[str]]:
        """Names of what there is of a job, by kind; what Kubernetes makes in each namespace aside."""
        return {
            plural: {
                each["metadata"]["name"]
                for each in self.list(plural)
                if each["metadata"].get("labels", {}).get("streamrl.io/job") == job
            }
            for plural in MADE
        }

    def versions(self, job: str) -> dict[tuple[str, str], str]:
        """Version of everything of a job and of the job: equal where nobody wrote."""
        found = {
            (plural, each["metadata"]["name"]): each["metadata"]["resourceVersion"]
            for plural in (*MADE, "pods")
            for each in self.list(plural)
            if each["metadata"].get("labels", {}).get("streamrl.io/job") == job
        }
        return found | {("rljobs", job): self.must("rljobs", job)["metadata"]["resourceVersion"]}

    def wait_until_quiet(self, job: str, operator: Operator) -> None:
        """Until the operator looks twice at a job and nothing of it is written."""

        def is_quiet() -> bool:
            before = self.versions(job)
            operator.wait_for_looks()
            return self.versions(job) == before

        self.wait(is_quiet, f"two looks at {job} without a change", operator)

    def wait(self, check: Any, what: str, operator: Operator, *, deadline_s: float = SOON_S) -> None:
        """Wait for a condition; meanwhile new pods of trainers become ready, as `make_trainers_ready` does it."""

        def is_so() -> Any:
            self.make_trainers_ready()
            return check()

        wait_until(is_so, what=what, deadline_s=deadline_s, log=operator.log)

    def make_trainers_ready(self) -> None:
        """Say that the trainers' pods are ready, of which nothing was said yet: no kubelet is here, and pools wait for them."""
        for lab in (self, *self.members):
            with suppress(httpx.TransportError):  # its API server is away
                for name in pods_unsaid(lab.list("pods")):
                    lab.cluster.api.patch(
                        lab.path("pods", name, "status"), TRAINER_READY
                    )  # one that is gone by now is none


def writes(cluster: ControlPlane, namespace: str) -> list[str]:
    """What the operator wrote in a namespace so far, its Lease and dry runs aside."""
    return [
        f"{use.verb} {use.resource} {use.name} {use.code}"
        for use in cluster.uses(USER)
        if use.verb in WRITES and use.namespace == namespace and use.resource != "leases" and not use.is_dry_run
    ]


def refused(cluster: ControlPlane, namespace: str, *, user: str = USER) -> set[str]:
    """What the operator asked for in a namespace and was never granted, though it can do without some of it (events).

    An API server that has just been started refuses for a moment what it grants later: it does not know the rules yet.
    """
    asked: dict[bool, set[str]] = {True: set(), False: set()}
    for use in cluster.uses(user):
        if use.namespace == namespace:
            asked[use.code == 403].add(f"{use.verb} {use.resource}")
    return asked[True] - asked[False]
