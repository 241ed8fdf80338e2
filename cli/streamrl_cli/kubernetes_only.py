"""Names the fields of a job that a local run does not use, where they are set. Imports no client."""

from collections.abc import Iterator

from streamrl.spec import RLJob
from streamrl.spec.base import SpecModel

_VOLUME = ("storage_class_name", "size", "claim_name", "when_deleted")


def unused_locally(job: RLJob) -> list[str]:
    """Paths of the fields, set to something else than their default, that only Kubernetes has a use for."""
    return list(_unused(job))


def unused_note(job: RLJob) -> str:
    """One line that names them; empty if there are none."""
    fields = unused_locally(job)
    return f"not used by a local run (for Kubernetes): {', '.join(fields)}" if fields else ""


def _unused(job: RLJob) -> Iterator[str]:
    spec = job.spec
    yield from _set(spec.task, ("code",), path="spec.task")
    for index, pool in enumerate(spec.generators):
        yield from _set(pool, ("pod",), path=f"spec.generators[{index}]")
        yield from _set(pool.scaling, ("external",), path=f"spec.generators[{index}].scaling")
    yield from _set(spec.trainer, ("pod", "disruption"), path="spec.trainer")
    yield from _set(spec.storage.checkpoints, _VOLUME, path="spec.storage.checkpoints")
    yield from _set(spec.storage.journal, _VOLUME, path="spec.storage.journal")
    yield from _set(spec.failure_policy, ("rules",), path="spec.failurePolicy")
    yield from _set(spec, ("managed_by", "active_deadline_seconds", "ttl_seconds_after_finished"), path="spec")


def _set(model: SpecModel, names: tuple[str, ...], *, path: str) -> Iterator[str]:
    changed = model.model_dump(by_alias=False, exclude_defaults=True)
    for name in names:
        if name in changed:
            yield f"{path}.{type(model).model_fields[name].alias}"
