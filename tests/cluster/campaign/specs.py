"""Job specs for the spec campaign, drawn by hypothesis: pairs that differ only in what may change while a job runs.

Bounds are those of the contract; what an API server demands beyond it (requests below limits, tolerations that fit) is met here, and is
broken on purpose in `mistakes.py`. Pools that scale themselves are pinned (least = most), and priority and runtime classes are left out: what
they lead to depends on more than the spec. Those that are not there stand in `mistakes.py` too.
"""

from threading import Lock
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from cluster.campaign.lab import JOB
from support.jobs import simulated_job

Spec = dict[str, Any]

NAMES = ("a", "gen-b", "eleven-char")
_WORDS = st.sampled_from(("x", "a-b", "0", "Long.Value_1", "z" * 63))
_KEYS = st.sampled_from(("team", "example.com/kind", "a.b", "k" * 63))
_QUANTITIES: tuple[tuple[str | int, str | int], ...] = (("100m", 1), (1, 2), ("1", "1"), ("1.5", "2"), ("2", "3"))
_SIZES = st.sampled_from(("1Gi", "500Mi", "10G"))
_EXAMPLES = 8
_ALONE = Lock()
"""Hypothesis draws something else where two threads draw at once."""


def drawn(number: int) -> tuple[Spec, Spec]:
    """The pair of that number, always the same one. Hypothesis begins with the simplest, so it is asked for some."""
    made: list[tuple[Spec, Spec]] = []

    @seed(number)
    @settings(
        max_examples=_EXAMPLES,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(pairs())
    def collect(pair: tuple[Spec, Spec]) -> None:
        made.append(pair)

    with _ALONE:
        collect()
    return made[-1]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Spec, Spec]:
    """(A, B): B may follow A in a running job."""
    base = draw(_immutable())
    return _with(base, draw(_mutable(len(base["generators"])))), _with(base, draw(_mutable(len(base["generators"]))))


def document(spec: Spec) -> dict[str, Any]:
    """The job of that spec."""
    return simulated_job() | {"metadata": {"name": JOB}, "spec": spec}


def _with(base: Spec, change: Spec) -> Spec:
    generators = [old | new for old, new in zip(base["generators"], change["generators"], strict=True)]
    return base | change | {"generators": generators}


@st.composite
def _immutable(draw: st.DrawFn) -> Spec:
    spec = simulated_job()["spec"]
    engine = spec["generators"][0]["engine"]
    pools = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    spec["generators"] = [{"name": name, "engine": engine} for name in pools]
    spec["seed"] = draw(st.integers(0, 2**31 - 1))
    spec["trainer"] |= {"disruption": draw(st.sampled_from(("Allow", "Block"))), "pod": draw(_pods())}
    spec["storage"] = {"checkpoints": draw(_checkpoints()), "journal": draw(_claims())}
    return spec


@st.composite
def _mutable(draw: st.DrawFn, pools: int) -> Spec:
    spec: Spec = {"generators": [{"scaling": draw(_scaling()), "pod": draw(_pods())} for _ in range(pools)]}
    spec["failurePolicy"] = draw(_policies())
    spec["suspend"] = draw(st.sampled_from((False, False, False, True)))
    for name in ("activeDeadlineSeconds", "ttlSecondsAfterFinished"):
        if draw(st.booleans()):
            spec[name] = draw(st.integers(3600, 31_536_000))
    return spec


def _scaling() -> st.SearchStrategy[Spec]:
    few = st.integers(1, 3)
    return st.one_of(
        few.map(lambda n: {"static": {"replicas": n}}),
        few.map(lambda n: {"external": {"initialReplicas": n}}),
        few.map(lambda n: {"auto": {"minReplicas": n, "initialReplicas": n, "maxReplicas": n}}),
    )


def _checkpoints() -> st.SearchStrategy[Spec]:
    kept = st.fixed_dictionaries({"intervalSteps": st.integers(1, 50), "keepLast": st.integers(1, 5)})
    named = st.fixed_dictionaries({"claimName": st.just("shared")})
    return st.one_of(kept, _claims(), named)


def _claims() -> st.SearchStrategy[Spec]:
    return st.fixed_dictionaries(
        {"size": _SIZES},
        optional={"storageClassName": st.just("fast"), "whenDeleted": st.sampled_from(("Delete", "Retain"))},
    )


@st.composite
def _policies(draw: st.DrawFn) -> Spec:
    names = draw(st.lists(st.sampled_from(("one", "two", "three")), max_size=3, unique=True))
    rule = st.fixed_dictionaries(
        {"action": st.sampled_from(("FailJob", "Restart", "ReplacePodAndIgnoreMaxRestarts"))},
        optional={
            "role": st.sampled_from(("Generator", "Trainer", "Scheduler")),
            "onReasons": st.lists(st.sampled_from(("Preempted", "OOMKilled", "Error")), max_size=3, unique=True),
            "onExitCodes": st.lists(st.integers(1, 255), max_size=4),
        },
    )
    return {"maxRestarts": draw(st.integers(0, 100)), "rules": [{"name": name} | draw(rule) for name in names]}


@st.composite
def _pods(draw: st.DrawFn) -> Spec:
    pod = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "image": st.sampled_from(("registry.example.com/a:1", "b@sha256:" + "0" * 64)),
                "imagePullPolicy": st.sampled_from(("Always", "IfNotPresent", "Never")),
                "imagePullSecrets": st.lists(st.sampled_from(("one", "two")), unique=True, max_size=2),
                "labels": st.dictionaries(_KEYS, _WORDS, max_size=3),
                "annotations": st.dictionaries(_KEYS, st.sampled_from(("", "any: {}", "ü")), max_size=2),
                "nodeSelector": st.dictionaries(_KEYS, _WORDS, max_size=2),
                "tolerations": st.lists(st.sampled_from(_TOLERATIONS), max_size=2),
                "affinity": st.sampled_from(({}, _AFFINITY)),
                "env": st.lists(st.sampled_from(_ENV), max_size=3, unique_by=lambda each: str(each["name"])),
            },
        )
    )
    least, most = draw(st.sampled_from(_QUANTITIES))
    if draw(st.booleans()):
        pod["resources"] = {"requests": {"cpu": least, "memory": "64Mi"}, "limits": {"cpu": most, "memory": "1Gi"}}
    volumes = draw(st.lists(st.sampled_from(_VOLUMES), max_size=2, unique_by=lambda each: str(each["name"])))
    if volumes:
        pod["volumes"] = volumes
        pod["volumeMounts"] = [
            {"name": each["name"], "mountPath": f"/mnt/{place}", "readOnly": draw(st.booleans())}
            for place, each in enumerate(volumes)
        ]
    return pod


_TOLERATIONS: tuple[Spec, ...] = (
    {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
    {"key": "spot", "value": "yes", "effect": "NoExecute", "tolerationSeconds": 300},
    {"key": "spot", "value": "yes"},
    {"operator": "Exists"},
)
_AFFINITY: Spec = {
    "podAntiAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 100, "podAffinityTerm": {"topologyKey": "kubernetes.io/hostname", "labelSelector": {}}}
        ]
    }
}
_ENV: tuple[Spec, ...] = (
    {"name": "A", "value": "1"},
    {"name": "A", "value": "$(B) \n 'x'"},
    {"name": "B", "value": ""},
    {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
)
_VOLUMES: tuple[Spec, ...] = (
    {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
    {"name": "prompts", "configMap": {"name": "prompts"}},
    {"name": "prompts", "secret": {"secretName": "cloud"}},
    {"name": "scratch", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}},
    {"name": "scratch", "emptyDir": {}},
    {"name": "token", "projected": {"sources": [{"serviceAccountToken": {"audience": "cloud", "path": "token"}}]}},
)
