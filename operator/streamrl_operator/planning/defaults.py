"""What a job inherits from administrators: the cluster's defaults, then the namespace's, then its own words. Pure.

Every pod is told as entries: a path (`nodeSelector`, `gpu`) and a value. Of several entries with one path the nearest counts, the job's before
the namespace's before the cluster's; of an enforced field the farthest. So lists and mappings grow, and each entry says where it is from.
What a job leaves at its default counts as not said: an API server writes all defaults into what it stores.

A job takes its defaults when it begins and keeps them (`keys.FILE_DEFAULTS`): changed or broken defaults reach only jobs that begin later.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamrl.errors import UserError, UserErrors
from streamrl.spec import RLJob, parse_job
from streamrl.spec.base import minimal
from streamrl.spec.parse import parse_document
from streamrl.spec.pod import OTHER_NETWORKS, Pod, RLJobDefaultsSpec, TrainerPod
from streamrl.spec.schema import children, plain_schema
from streamrl_operator.planning.values import PlanningSettings

OF_JOB, OF_CLUSTER = "the job", "the chart's jobDefaults"
Path = tuple[str, ...]
_FIELDS = children(plain_schema(TrainerPod))
_FOLLOWS = {"image": "tasksImage"}
"""Enforced field -> the job's own word that goes too: both images are of one release."""


_AGENT_POOL = "spec.task.agent.pool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The defaults of one administrator."""

    source: str
    """Of which object, for people."""
    spec: RLJobDefaultsSpec

    def values(self, role: str) -> dict[str, Any]:
        """What it says of a `role`: `trainer`, `generator`, `agents` (a pod), `storage` (a claim), `cache` (of a pool)."""
        if role == "cache":
            said: dict[str, Any] = minimal(self.spec.weight_cache) or {}
            return said
        if role == "storage":
            return {"storageClassName": self.spec.storage_class_name} if self.spec.storage_class_name else {}
        image = getattr(self.spec.images, role, None)  # agents have the user's, or the trainer's
        values: dict[str, Any] = minimal(self.spec.pod)
        return values | ({"image": image} if image else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One value of a merged job that is not simply its own word."""

    field: str
    """In the job."""
    value: Any
    """None: what stood there is left out."""
    source: str
    is_enforced: bool = False


def read_layers(text: str) -> tuple[Layer, ...]:
    """The layers that are written down, the cluster's first.

    Raises:
        UserErrors: one line for each mistake, with the object and the field.
    """
    return tuple(_layer(each["source"], each["spec"]) for each in (json.loads(text) if text else ()))


def _layer(source: str, spec: object) -> Layer:
    try:
        parsed = parse_document(spec, model=RLJobDefaultsSpec, rule="must be a mapping")
    except UserErrors as errors:
        told = [
            UserError(field=f"{source}: spec.{one.field}", rule=one.rule, got=one.got, fix=one.fix)
            for one in errors.errors
        ]
        raise UserErrors(told) from None
    return Layer(source=source, spec=parsed)


def write_layers(specs: Mapping[str, object]) -> str:
    """As `read_layers` reads it. `specs`: source -> spec, the cluster's first; empty where there is nothing to inherit."""
    said = ((source, _said(spec)) for source, spec in specs.items())
    layers = [{"source": source, "spec": spec} for source, spec in said if spec]
    return json.dumps(layers, sort_keys=True, separators=(",", ":"), ensure_ascii=False) if layers else ""


def _said(spec: object) -> object:
    """Without what is left at its default; one with a mistake stays as it is, to be told."""
    try:
        return minimal(_layer("", spec).spec) if spec else None
    except UserErrors:
        return spec


def refused_here(job: RLJob, *, namespace: str, settings: PlanningSettings) -> list[UserError]:
    """What no job may have on a cluster, and what only some namespaces' jobs may have."""
    if job.spec.pipeline.mode != "Colocated" and job.spec.lent_pools:
        return [_lent(number) for number, pool in enumerate(job.spec.generators) if pool.devices == "Trainer"]
    if namespace in settings.rdma_namespaces:
        return []
    pods: list[tuple[str, Pod]] = [("spec.trainer.pod", job.spec.trainer.pod)]
    pods += [(f"spec.generators[{number}].pod", pool.pod) for number, pool in enumerate(job.spec.generators)]
    if job.spec.agent_pool is not None:
        pods.append((f"{_AGENT_POOL}.pod", job.spec.agent_pool.pod))
    asked = [(f"{field}.hostNetwork", pod.host_network) for field, pod in pods]
    asked += [(f"{field}.securityContext.capabilities.add", pod.locks_memory) for field, pod in pods]
    asked += [
        (f"{field}.annotations.{key}", key.startswith(OTHER_NETWORKS)) for field, pod in pods for key in pod.annotations
    ]
    rule = f"is refused: the administrator does not allow it in namespace {namespace}"
    fix = "use resources or resourceClaims of a device plugin, or ask for the chart's rdmaNamespaces"
    return [UserError(field=field, rule=rule, fix=fix) for field, is_asked in asked if is_asked]


def _lent(number: int) -> UserError:
    rule, fix = "must not be Trainer on a cluster: a pod has devices of its own", "leave it out, or use streamrl run"
    return UserError(field=f"spec.generators[{number}].devices", rule=rule, got="Trainer", fix=fix)


def inherit(job: RLJob, layers: Sequence[Layer]) -> tuple[RLJob, tuple[Entry, ...]]:
    """The job with what it inherits, and where that is from.

    Raises:
        UserErrors: job and defaults do not go together.
    """
    if not layers:
        return job, ()
    document: dict[str, Any] = minimal(job)
    spec, origins = document["spec"], list[Entry]()
    places = [("trainer", "spec.trainer.pod", spec.setdefault("trainer", {}), "pod")]
    places += [
        ("generator", f"spec.generators[{number}].pod", pool, "pod") for number, pool in enumerate(spec["generators"])
    ]
    if job.spec.agent_pool is not None:
        places.append(("agents", f"{_AGENT_POOL}.pod", spec["task"]["agent"]["pool"], "pod"))
    if any(each.spec.weight_cache for each in layers):
        places += [
            ("cache", f"spec.generators[{number}].weightCache", pool, "weightCache")
            for number, pool in enumerate(spec["generators"])
        ]
    storage = spec.setdefault("storage", {})
    for claim in ("checkpoints", "journal"):
        places.append(("storage", f"spec.storage.{claim}", storage, claim))
    for role, field, parent, key in places:
        own = parent.get(key, {})
        if role == "storage" and any(own.get(one) for one in ("claimName", "resumeFrom", "weightsFrom")):
            continue  # nothing is made
        parent[key], found = _merged(own, [(each, each.values(role)) for each in layers])
        origins += [_with_field(each, field) for each in found]
    try:
        return parse_job(document), tuple(origins)
    except UserErrors as errors:
        sources = " and ".join(layer.source for layer in layers)
        told = [
            UserError(field=one.field, rule=f"with {sources}: {one.rule}", got=one.got, fix=one.fix)
            for one in errors.errors
        ]
        raise UserErrors(told) from None


def _with_field(entry: Entry, field: str) -> Entry:
    return replace(entry, field=f"{field}.{entry.field}")


def _merged(own: dict[str, Any], layers: Sequence[tuple[Layer, dict[str, Any]]]) -> tuple[dict[str, Any], list[Entry]]:
    """A pod (or claim) with what it inherits; what of it is not its own."""
    found: dict[Path, tuple[Any, str]] = {}
    for source, values in (*((layer.source, values) for layer, values in layers), (OF_JOB, own)):
        found |= {path: (value, source) for path, value in _entries(values)}
    enforced: set[Path] = set()
    for layer, values in reversed(layers):
        said = dict(_entries(values))
        for field in layer.spec.enforced:
            theirs = {path: (value, layer.source) for path, value in said.items() if path[0] == field}
            if not _has_keys(field):
                fields = (field, _FOLLOWS.get(field))
                gone = {path for path in found if path[0] in fields and path not in theirs}
                theirs |= dict.fromkeys(gone, (None, layer.source))
            found |= theirs
            enforced |= theirs.keys()
    origins = [
        Entry(field=_text(path), value=value, source=source, is_enforced=path in enforced)
        for path, (value, source) in found.items()
        if source != OF_JOB
    ]
    return _rebuilt({path: value for path, (value, _) in found.items() if value is not None}), origins


def _entries(values: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Each thing that is said, by a path that is the same in all layers."""
    for field, value in values.items():
        if field == "resources":
            for part, amounts in value.items():
                yield from (((field, part, key), item) for key, item in _keyed(amounts, key="name"))
        elif isinstance(value, (dict, list)):
            yield from (((field, key), item) for key, item in _keyed(value, key=_key(field)))
        else:
            yield (field,), value


def _keyed(value: dict[str, Any] | list[Any], *, key: str | None) -> Iterator[tuple[str, Any]]:
    """An item of a list without keys is its own key: it is there once, whoever says it."""
    if isinstance(value, dict):
        yield from value.items()
    else:
        yield from ((str(item[key]) if key else json.dumps(item, sort_keys=True), item) for item in value)


def _key(field: str) -> str | None:
    """By which the items of a list are told apart; None: they have none."""
    keys = _FIELDS.get(field, {}).get("x-kubernetes-list-map-keys")
    return keys[0] if keys else None


def _has_keys(field: str) -> bool:
    return _FIELDS.get(field, {}).get("type") == "object" or _key(field) is not None


def _rebuilt(found: Mapping[Path, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for path, value in found.items():
        if len(path) == 1:
            values[path[0]] = value
            continue
        parent = values
        for part in path[:-2]:
            parent = parent.setdefault(part, {})
        if _is_list(path):
            parent.setdefault(path[-2], []).append(value)
        else:
            parent.setdefault(path[-2], {})[path[-1]] = value
    return values


def _is_list(path: Path) -> bool:
    schema = _FIELDS[path[0]]
    return (children(schema)[path[1]] if path[0] == "resources" else schema).get("type") == "array"


def _text(path: Path) -> str:
    """As in a job; the items of a list by their key."""
    if len(path) == 1:
        return path[0]
    last = f"[{path[-1]}]" if _is_list(path) and (_key(path[0]) or path[0] == "resources") else f".{path[-1]}"
    return ".".join(path[:-1]) + ("" if _is_list(path) and last.startswith(".") else last)
