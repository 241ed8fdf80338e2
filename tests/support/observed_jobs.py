"""Jobs as the operator observes them: documents, pods in every state, and what a cluster has after a verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from streamrl import names
from streamrl.spec import RLJob, parse_job
from streamrl_operator.planning.objects.shared import JobPlan, resolved_job
from streamrl_operator.planning.values import JobDecision, Observed, PlanningSettings
from support.jobs import simulated_job

JOB = "simulated"
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
SETTINGS = PlanningSettings(namespace="streamrl-system", trainer_image="t", generator_image="g", resync_s=30.0)
Doc = dict[str, Any]
OURS = {"manager": names.REPLICAS_MANAGER, "operation": "Apply", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
"""Managed fields of a pool whose replicas are ours."""
BY_AN_HPA = {
    "manager": "hpa",
    "operation": "Update",
    "subresource": "scale",
    "fieldsV1": {"f:spec": {"f:replicas": {}}},
}


def job_document(*, scaling: Doc | None = None, status: Doc | None = None, **spec: Any) -> Doc:
    """A simulated job with one pool `sim`, as an API server has it."""
    document = simulated_job()
    document["metadata"] |= {"namespace": "default", "uid": "u-job", "generation": 1}
    document["spec"]["failurePolicy"] = {"maxRestarts": 3}
    document["spec"] |= spec
    if scaling is not None:
        document["spec"]["generators"][0]["scaling"] = scaling
    return {**document, "status": status} if status else document


def validated(document: Doc) -> RLJob:
    """As the handlers validate it."""
    kept = ("name", "namespace", "labels", "annotations")
    metadata = {key: value for key, value in document["metadata"].items() if key in kept}
    return parse_job({**{key: document[key] for key in ("apiVersion", "kind", "spec")}, "metadata": metadata})


def observed(document: Doc | None = None, **changes: Any) -> Observed:
    """A look at the job; `changes`: of the fields of Observed, or spec by `spec={...}`."""
    document = job_document(**changes.pop("spec", {})) if document is None else document
    return replace(Observed(now=NOW, raw=document, job=validated(document)), **changes)


def container(  # noqa: PLR0913 - a container's status has so many sides
    name: str,
    *,
    restarts: int = 0,
    code: int | None = None,
    waiting: str | None = None,
    last: int | None = None,
    reason: str = "Error",
    message: str = "",
    runtime_id: str = "",
) -> Doc:
    """Status of a container: running, ended with `code`, or waiting; `last`: exit code of the time before."""
    ended = {"exitCode": code if code is not None else last, "reason": reason, "message": message}
    if runtime_id:
        ended["containerID"] = f"containerd://{runtime_id}"
    state: Doc = {"running": {}}
    if waiting is not None:
        state = {"waiting": {"reason": waiting, "message": f"kubelet says {waiting}"}}
    elif code is not None:
        state = {"terminated": ended}
    before = {} if last is None else {"lastState": {"terminated": ended}}
    return {"name": name, "image": "registry/x", "restartCount": restarts, "state": state, **before}


def pod(  # noqa: PLR0913 - as a pod has
    name: str,
    *,
    containers: Sequence[Doc] = (),
    init: Sequence[Doc] = (),
    ready: bool = True,
    leaving: bool = False,
    uid: str | None = None,
    phase: str = "Running",
    reason: str | None = None,
    disruption: str | None = None,
    unscheduled: str | None = None,
    revision: str = "r1",
) -> Doc:
    """A pod of the job by its name: `simulated-trainer-0`, `simulated-trainer-workers-<n>` or `simulated-<pool>-<n>`."""
    pool = name.removeprefix(f"{JOB}-").rpartition("-")[0]
    labels = {names.LABEL_JOB: JOB, names.LABEL_ROLE: "trainer", "controller-revision-hash": revision}
    if pool == "trainer-workers":
        labels |= {names.LABEL_ROLE: "trainer-worker"}
    elif pool != "trainer":
        labels |= {names.LABEL_ROLE: names.AGENTS if pool == names.AGENTS else "generator", names.LABEL_POOL: pool}
    metadata = {"name": name, "uid": uid or f"u-{name}", "labels": labels}
    conditions = [
        {"type": "Ready", "status": str(ready)},
        {"type": "PodScheduled", "status": str(unscheduled is None), "reason": "Unschedulable", "message": unscheduled},
    ]
    if disruption is not None:
        conditions.append({"type": "DisruptionTarget", "status": "True", "reason": disruption, "message": "m"})
    status = {"phase": phase, "conditions": conditions, "containerStatuses": list(containers)}
    return {
        "metadata": metadata | ({"deletionTimestamp": "2026-01-01T12:00:00Z"} if leaving else {}),
        "status": status | {"initContainerStatuses": list(init)} | ({"reason": reason} if reason else {}),
    }


def trainer(**given: Any) -> Doc:
    """The trainer's pod."""
    return pod(f"{JOB}-trainer-0", **given)


def trainer_worker(ordinal: int = 0, **given: Any) -> Doc:
    """The pod of a further node of the trainer."""
    return pod(f"{JOB}-trainer-workers-{ordinal}", **given)


def generator(ordinal: int = 0, **given: Any) -> Doc:
    """A generator's pod."""
    return pod(f"{JOB}-sim-{ordinal}", **given)


def agents(ordinal: int = 0, **given: Any) -> Doc:
    """A pod of agents."""
    return pod(f"{JOB}-{names.AGENTS}-{ordinal}", **given)


def with_agents(**pool: Any) -> Doc:
    """The task of a job with a pool of agents."""
    agent = {"command": ["python", "agent.py"], "pool": pool}
    return simulated_job()["spec"]["task"] | {"agent": agent, "rewards": [{"name": "game", "environment": {}}]}


def trainer_whose(**state: Any) -> Doc:
    """The trainer's pod, whose container is in that state (`container`)."""
    return trainer(containers=[container("trainer", **state)])


def generator_whose(ordinal: int = 0, **state: Any) -> Doc:
    """A generator's pod, whose container is in that state (`container`)."""
    return generator(ordinal, containers=[container("generator", **state)])


def all_ready(generators: int = 2) -> list[Doc]:
    """The trainer and so many generators, all ready."""
    return [trainer(), *(generator(ordinal) for ordinal in range(generators))]


def pool_object(replicas: int | None, *, scaling: str, managers: Sequence[Doc] = (OURS,), **status: Any) -> Doc:
    """The GeneratorPool of pool `sim`."""
    return {
        "metadata": {"name": f"{JOB}-sim", "generation": 1, "managedFields": list(managers)},
        "spec": {"jobName": JOB, "poolName": "sim", "role": "generator", "scaling": scaling, "replicas": replicas},
        "status": status,
    }


def page(*, step: int = 3, **changes: Any) -> Doc:
    """The scheduler's /numbers, with what the operator reads of it."""
    parts = {"busy": 0.5, "pipeline_no_samples": 0.2, "pipeline_staleness": 0.1, "weights": 0.05, "skew": 0.1}
    whole = {
        "attempt": 1,
        "step": step,
        "ended": False,
        "queue": 7,
        "generators": [],
        "trainer": None,
        "scaling": {
            "since_step_s": 0.0,
            "all": {"tokens_per_s": 1234.567},
            "trainer": {"busy": 0.4, "pipeline_no_samples": 0.6},
            "pools": {"sim": {"generators": 3, "parts": parts}},
        },
        "dispatch": {"pools": {}},
        "last_evaluation": {"mean_reward": 0.123456},
        "checkpoint": {"step": 2, "path": "checkpoints/step-00000002"},
    }
    return whole | changes


def carried_out(look: Observed, decision: JobDecision, *, seconds: float = 0.0) -> Observed:
    """The same job after the verdict was carried out, so many seconds later; pods stay as they are."""
    raw: Mapping[str, Any] = {**look.raw, "status": decision.status}
    pools = {name: _pool_after(look, decision, name=name) for name in decision.pool_statuses}
    resolved = look.resolved if look.job is None or decision.stops_first else _resolved_after(look, look.job, decision)
    now, at_s = look.now + timedelta(seconds=seconds), look.at_s + seconds
    return replace(look, raw=raw, pools=pools, resolved=resolved, scaling=decision.scaling, now=now, at_s=at_s)


def _resolved_after(look: Observed, job: RLJob, decision: JobDecision) -> Doc:
    plan = JobPlan(
        job=job, namespace="default", uid="u-job", wanted=decision.wanted, settings=SETTINGS, resolved=look.resolved
    )
    data: Doc = resolved_job(plan)["data"]
    return data


def _pool_after(look: Observed, decision: JobDecision, *, name: str) -> Doc:
    found = look.pools.get(name) or {"metadata": {"name": f"{JOB}-{name}", "generation": 1}, "spec": {"replicas": 1}}
    metadata, spec = dict(found["metadata"]), dict(found["spec"])
    if look.job is not None:
        spec["scaling"] = next(pool.scaling.key for pool in look.job.spec.generators if pool.name == name)
    if name in decision.wanted.requested:
        spec["replicas"] = decision.wanted.requested[name]
        metadata["managedFields"] = [OURS]
    return {"metadata": metadata, "spec": spec, "status": decision.pool_statuses[name]}
