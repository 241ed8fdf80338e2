"""What happens to a job in the campaigns: from where, what is done, and what a good end is.

Pods never run here. Where a story needs a kubelet, the scenario writes the pod's status.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.campaign.lab import JOB, Lab, Objects
from streamrl import names
from support.jobs import simulated_job

_Act = Callable[[Lab], Awaitable[Any]]
TRAINER_POD = f"{names.trainer(JOB)}-0"
_EXIT_OF_RULE, _EXIT_FATAL = 77, 2


def job(**spec: Any) -> dict[str, Any]:
    """A job with a pool of each kind of scaling, and a rule that replaces a pod."""
    document = simulated_job()
    document["metadata"]["name"] = JOB
    engine = document["spec"]["generators"][0]["engine"]
    document["spec"]["generators"] = [
        {"name": "fixed", "engine": engine, "scaling": {"static": {"replicas": 2}}},
        {"name": "auto", "engine": engine, "scaling": {"auto": {"maxReplicas": 4}}},
        {"name": "free", "engine": engine, "scaling": {"external": {"initialReplicas": 3}}},
    ]
    rule = {"name": "again", "onExitCodes": [_EXIT_OF_RULE], "action": "ReplacePodAndIgnoreMaxRestarts"}
    document["spec"]["failurePolicy"] = {"maxRestarts": 5, "rules": [rule]}
    document["spec"] |= spec
    return document


def pools(**changes: Mapping[str, Any]) -> dict[str, Any]:
    """A change of pools by name, as a change of the job."""
    made = [pool | changes.get(pool["name"], {}) for pool in job()["spec"]["generators"]]
    return {"spec": {"generators": made}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One story."""

    name: str
    act: _Act
    after: str = ""
    """The scenario whose end this one begins at; empty: an empty namespace."""
    wrong: Callable[[Objects], str]
    """What is not yet as it should be at the end; empty: nothing. A check of the undisturbed run, which all others must equal."""
    left: Callable[[Objects], str] = lambda _: ""
    """What the act has left and must be gone at the end, of which pictures say nothing; empty: nothing."""
    forgiven: tuple[str, ...] = ()
    """Fields of the picture and reasons of events that may differ (docs/benchmarks/track-record.md says why)."""
    looks: bool = True
    """Whether a job is left that the operator looks at by itself."""


async def _scale(lab: Lab) -> None:
    await lab.patch("rljobs", JOB, pools(fixed={"scaling": {"static": {"replicas": 5}}}))
    await lab.scale("free", 6)


async def _edit(lab: Lab) -> None:
    pod = {
        "image": "generator:other",
        "labels": {"team": "a"},
        "env": [{"name": "A", "value": "1"}],
        "resources": {"requests": {"cpu": "500m"}, "limits": {"memory": "2Gi"}},
    }
    await lab.patch("rljobs", JOB, pools(fixed={"pod": pod}, auto={"pod": {"nodeSelector": {"disk": "fast"}}}))


async def _convert(lab: Lab) -> None:
    change = pools(
        fixed={"scaling": {"external": {"initialReplicas": 1}}},
        auto={"scaling": {"static": {"replicas": 3}}},
        free={"scaling": {"auto": {"minReplicas": 2, "initialReplicas": 2, "maxReplicas": 2}}},
    )
    await lab.patch("rljobs", JOB, change)


def _suspend(*, value: bool) -> _Act:
    return lambda lab: lab.patch("rljobs", JOB, {"spec": {"suspend": value}})


def _end_container(exit_code: int) -> _Act:
    ended = {"exitCode": exit_code, "reason": "Error", "containerID": f"test://{exit_code:064d}"}
    container = {
        "name": names.CONTAINER_TRAINER,
        "image": "trainer:test",
        "imageID": "test",
        "ready": False,
        "restartCount": 0,
        "state": {"terminated": ended},
    }
    change = {"status": {"containerStatuses": [container]}}
    return lambda lab: lab.patch("pods", TRAINER_POD, change, part="status")


def sizes(objects: Objects, plural: str = "statefulsets") -> dict[str, int]:
    """Replicas by the name's last part."""
    found = {name: obj for (kind, name), obj in objects.items() if kind == plural}
    return {name.rpartition("-")[2]: obj["spec"]["replicas"] for name, obj in found.items()}


RUNNING = {"trainer": 1, "fixed": 2, "auto": 1, "free": 3}
STOPPED = dict.fromkeys(RUNNING, 0)


def _status(objects: Objects) -> Mapping[str, Any]:
    return (objects.get(("rljobs", JOB)) or {}).get("status") or {}


def _condition(objects: Objects, kind: str) -> str:
    conditions = _status(objects).get("conditions") or ()
    return next((each["status"] for each in conditions if each["type"] == kind), "")


def _sized(want: Mapping[str, int], *, condition: str = "") -> Callable[[Objects], str]:
    """The StatefulSets' replicas, as many pods, and a condition that holds."""

    def wrong(objects: Objects) -> str:
        have, pods = sizes(objects), sum(kind == "pods" for kind, _ in objects)
        if have != want:
            return f"sizes are {have}, should be {want}"
        if pods != sum(want.values()):
            return f"there are {pods} pods, should be {sum(want.values())}"
        if not _status(objects).get("conditions"):
            return "the job has no conditions"
        return f"{condition} does not hold" if condition and _condition(objects, condition) != "True" else ""

    return wrong


def _edited(objects: Objects) -> str:
    template = objects["statefulsets", f"{JOB}-fixed"]["spec"]["template"]
    image = template["spec"]["containers"][0]["image"]
    return _sized(RUNNING)(objects) or ("" if image == "generator:other" else f"image is {image}")


def _counted(name: str) -> Callable[[Objects], str]:
    def wrong(objects: Objects) -> str:
        found = _status(objects).get(name)
        return _sized(RUNNING)(objects) or ("" if found == 1 else f"{name} is {found}, should be 1")

    return wrong


def _ended_pod(objects: Objects) -> str:
    """The pod whose container has ended, until it is replaced."""
    told = (objects.get(("pods", TRAINER_POD)) or {}).get("status") or {}
    return f"{TRAINER_POD} is not replaced" if told.get("containerStatuses") else ""


def _gone(objects: Objects) -> str:
    kept = {("persistentvolumeclaims", names.checkpoints_claim(JOB))}
    return "" if set(objects) == kept else f"left over: {sorted(set(objects) - kept)[:3]}"


SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(name="create", act=lambda lab: lab.create("rljobs", job()), wrong=_sized(RUNNING)),
        Scenario(name="scale", act=_scale, after="create", wrong=_sized(RUNNING | {"fixed": 5, "free": 6})),
        Scenario(name="edit", act=_edit, after="create", wrong=_edited),
        Scenario(
            name="convert",
            act=_convert,
            after="create",
            wrong=_sized(RUNNING | {"auto": 3, "free": 2}),
            forgiven=("status.reason", "scalingHistory.1.reason", "Scaled"),
        ),
        Scenario(
            name="suspend",
            act=_suspend(value=True),
            after="create",
            wrong=_sized(STOPPED, condition="Suspended"),
            looks=False,
        ),
        Scenario(name="resume", act=_suspend(value=False), after="suspend", wrong=_sized(RUNNING)),
        Scenario(name="restart", act=_end_container(1), after="create", wrong=_counted("restarts")),
        Scenario(
            name="replace",
            act=_end_container(_EXIT_OF_RULE),
            after="create",
            wrong=_counted("ignoredRestarts"),
            left=_ended_pod,
            forgiven=("status.ignoredRestarts", "PodFailed"),
        ),
        Scenario(
            name="fail",
            act=_end_container(_EXIT_FATAL),
            after="create",
            wrong=_sized(STOPPED, condition="Failed"),
            looks=False,
        ),
        Scenario(name="delete", act=lambda lab: lab.delete("rljobs", JOB), after="create", wrong=_gone, looks=False),
        Scenario(name="recreate", act=lambda lab: lab.create("rljobs", job()), after="delete", wrong=_sized(RUNNING)),
    )
}


def way_to(name: str) -> list[Scenario]:
    """The scenarios that lead to where this one begins, in order."""
    before = SCENARIOS[name].after
    return [*way_to(before), SCENARIOS[before]] if before else []
