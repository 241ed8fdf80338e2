"""A job's status: what is stored as values and back, the numbers of the scheduler's page in it, and the images that the job began with.

Reading never fails: what this operator does not know or cannot read (a newer one's field, another controller's) is left
out, item by item. The conditions are the job's memory: one bad entry must not make an ended job begin again.
Numbers: a page that is missing or not whole changes nothing; numbers are rounded, so that noise is no write.
Images: all workers of a job are of one release, and an upgrade restarts nothing that runs. So the operator's images are taken once, when pods
are first wanted, and kept in the ConfigMap of the resolved job. Where it is lost and there are pods, the status says them, or the StatefulSets.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypeVar

from pydantic import ValidationError

from streamrl import keys, names
from streamrl.spec import RLJobSpec
from streamrl.spec.base import SpecModel
from streamrl.spec.pod import Pod
from streamrl.spec.rljob import MaxCost
from streamrl.spec_warnings import spec_warnings
from streamrl.status import Bubbles, GeneratorPoolStatus, Images, RLJobStatus
from streamrl_operator.planning import conditions, pods
from streamrl_operator.planning.conditions import (
    COST_ABOVE_MAX,
    LOGPROB_DIFF_HIGH,
    PROCESS_FROZEN,
    SPEC_WARNINGS,
    Aspect,
)
from streamrl_operator.planning.values import Object, Observed, PlanningSettings, seconds_since, stamp

_Status = TypeVar("_Status", bound=SpecModel)


def read_job_status(job: Object) -> RLJobStatus:
    """Of an RLJob as stored; empty at the first visit."""
    return _read(RLJobStatus, job.get("status"))


def read_pool_status(pool: Object | None) -> GeneratorPoolStatus:
    """Of a GeneratorPool as stored; empty while there is none."""
    return _read(GeneratorPoolStatus, None if pool is None else pool.get("status"))


def plain_status(status: SpecModel) -> dict[str, Any]:
    """As it is written: what is unknown or empty is left out."""
    return status.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def _read(model: type[_Status], document: object) -> _Status:
    if not isinstance(document, Mapping):
        return model()
    whole = _valid(model, document)
    if whole is not None:
        return whole
    kept = {key: _kept(model, key, value) for key, value in document.items()}
    return _valid(model, {key: value for key, value in kept.items() if value is not None}) or model()


def _kept(model: type[SpecModel], key: str, value: object) -> object:
    """The value, or the items of it, that can be read; None if nothing can."""
    if isinstance(value, list):
        value = [item for item in value if _valid(model, {key: [item]}) is not None]
    return None if _valid(model, {key: value}) is None else value


def _valid(model: type[_Status], document: Mapping[str, Any]) -> _Status | None:
    try:
        return model.model_validate_json(json.dumps(document))
    except ValidationError:
        return None


def images_of_job(observed: Observed, *, settings: PlanningSettings, begins: bool) -> Images | None:
    """What was taken, or is taken now if the job `begins`; None: it has not begun."""
    kept = _kept_images(observed.resolved.get(keys.FILE_IMAGES, ""))
    if kept is not None or not begins:
        return kept
    trainer = observed.sets.get(names.trainer(observed.name))
    # What has no pods may be as old as it likes.
    return _images_seen(observed, default=settings.images) if pods.asked(trainer) else settings.images


def _kept_images(text: str) -> Images | None:
    try:
        return Images.model_validate_json(text)
    except ValidationError:
        return None


def _images_seen(observed: Observed, *, default: Images) -> Images:
    reported, job = read_job_status(observed.raw).images, observed.job
    assert job is not None, "only a valid job begins"
    if reported is not None:
        return reported
    name, trainer = job.metadata.name, job.spec.trainer
    pools = [_default_in(observed.sets.get(names.pool(name, pool.name)), pod=pool.pod) for pool in job.spec.generators]
    found = observed.sets.get(names.trainer(name))
    image = _default_in(found, pod=trainer.pod) or default.trainer
    return Images(
        trainer=image,
        generator=next((image for image in pools if image), default.generator),
        tasks=image if found is not None and _has_tasks(found) else None,
    )


def _default_in(found: Object | None, *, pod: Pod) -> str:
    """The operator's image in a StatefulSet; empty: there is none, or the job names its own."""
    if found is None or pod.image is not None:
        return ""
    return str(found["spec"]["template"]["spec"]["containers"][0]["image"])


def _has_tasks(found: Object) -> bool:
    """Whether the user's functions have a container of their own in a StatefulSet."""
    beside = found["spec"]["template"]["spec"].get("initContainers") or ()
    return any(one["name"] == names.CONTAINER_TASKS for one in beside)


_DIGITS = 4
"""Of rewards and rates."""
_PIPELINE = "pipeline"
"""Parts of the wall whose names begin so are idle time that another stage causes (docs/concepts.md, Bubbles)."""


def with_progress(
    before: RLJobStatus, page: Mapping[str, Any] | None, *, spec: RLJobSpec, store: str, now: datetime, every_s: float
) -> RLJobStatus:
    """The status with the page's numbers, if anything differs and it is time, or `maxCost` is reached. `store`: the job's directory on the checkpoints' volume."""
    since_s = seconds_since(before.progress_time, now=now)
    if page is None:
        return before
    numbers = _numbers(page, spec=spec, store=store)
    is_above, was_above = (_is_above(cost, spec.max_cost) for cost in (numbers.get("cost"), before.cost))
    if since_s is not None and 0 <= since_s < every_s and (was_above or not is_above):
        return before
    if before.cost is not None and "cost" in numbers:  # a scheduler that was killed forgets its last minutes
        numbers["cost"] = max(before.cost, numbers["cost"])
    after = before.model_copy(update=numbers)
    return before if after == before else after.model_copy(update={"progress_time": stamp(now)})


def calls(page: Mapping[str, Any], *, max_cost: MaxCost | None) -> object:
    """Return what of a page may have to be acted on; while it is equal, all else are numbers to show."""
    cost = rounded(page.get("cost"))
    return *(page.get(key) for key in ("attempt", "result", "warnings")), _is_above(cost, max_cost)


def _is_above(cost: float | None, bound: MaxCost | None) -> bool:
    return bound is not None and (cost or 0.0) >= float(bound.amount)


def logprob_diff(before: RLJobStatus, page: Mapping[str, Any] | None) -> Aspect | None:
    """What the page says of the train-infer log-prob difference; a page without a word of it changes nothing. None: nothing is known."""
    was = conditions.kept(before.conditions, LOGPROB_DIFF_HIGH)
    found = None if page is None else page.get("warnings")
    if not isinstance(found, list):
        return was
    named = (one for one in found if isinstance(one, Mapping) and one.get("type") == LOGPROB_DIFF_HIGH)
    warning = next(named, None)
    if warning is None:
        return Aspect(type=LOGPROB_DIFF_HIGH, holds=False, reason="WithinBound")
    if was is not None and was.holds:  # its figures change with each step, what is to be done does not
        return was
    return Aspect(type=LOGPROB_DIFF_HIGH, holds=True, reason="AboveBound", message=text(warning.get("message")))


def process_frozen(before: RLJobStatus, page: Mapping[str, Any] | None, *, running: bool) -> Aspect | None:
    """Whether processes show no sign of life, by the page; None: none ever did. Without a page nothing changes while the job has pods."""
    was = conditions.kept(before.conditions, PROCESS_FROZEN)
    found = None if page is None else page.get("warnings")
    if not running:
        found = []
    if not isinstance(found, list):
        return was
    silent = [one for one in found if isinstance(one, Mapping) and one.get("type") == PROCESS_FROZEN]
    if silent:
        message = "; ".join(text(one.get("message")) for one in silent)
        return Aspect(type=PROCESS_FROZEN, holds=True, reason="NoSignOfLife", message=message)
    return None if was is None else Aspect(type=PROCESS_FROZEN, holds=False, reason="AllAlive")


def cost_above_max(status: RLJobStatus, *, bound: MaxCost | None) -> Aspect | None:
    """Whether the job has cost too much; None: it may cost anything."""
    if bound is None:
        return None
    if not _is_above(status.cost, bound):
        return Aspect(type=COST_ABOVE_MAX, holds=False, reason="WithinMaxCost")
    then = "the job is suspended; raise the amount to go on" if bound.action == "Suspend" else "the job goes on"
    message = f"the job has cost at least maxCost.amount {bound.amount}: {then}"
    return Aspect(type=COST_ABOVE_MAX, holds=True, reason="AboveMaxCost", message=message)


def doubtful_fields(before: RLJobStatus, *, spec: RLJobSpec | None) -> Aspect | None:
    """Return the warnings about the fields of the job; None: there never was one. A job that is not valid keeps the last verdict."""
    was = conditions.kept(before.conditions, SPEC_WARNINGS)
    if spec is None:
        return was
    if found := spec_warnings(spec):
        return Aspect(type=SPEC_WARNINGS, holds=True, reason="WarningsFound", message="\n".join(map(str, found)))
    return None if was is None else Aspect(type=SPEC_WARNINGS, holds=False, reason="NoWarnings")


def checkpoint_path(store: str, path: object) -> str | None:
    """Directory of a checkpoint on the checkpoints' volume; `path` is from `store`, the job's own directory there."""
    return f"{store}/{path}"[:_LONGEST_PATH] if isinstance(path, str) and path else None


_LONGEST_PATH = 1024
_LARGEST = 1e15
"""An API server takes no whole number above 64 bits; a page that says more is wrong."""


def rounded(value: object) -> float | None:
    """A number with `_DIGITS` digits; None if it is none."""
    number = _number(value)
    return None if number is None else float(f"{number:.{_DIGITS}g}")


def whole_number(value: object) -> int | None:
    """A whole number that is not negative; None if it is none."""
    number = _number(value)
    return int(number) if number is not None and number >= 0 else None


def text(value: object) -> str:
    """A text; empty if it is none."""
    return value if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= _LARGEST else None  # of a NaN this does not hold either


def _numbers(page: Mapping[str, Any], *, spec: RLJobSpec, store: str) -> dict[str, Any]:
    """Field of the status -> value; what the page does not say is left out."""
    rate, cost = rounded(_at(page, "scaling", "all", "tokens_per_s")), rounded(page.get("cost"))
    found = {
        "attempt": whole_number(page.get("attempt")),
        "step": whole_number(page.get("step")),
        "reward": rounded(_at(page, "last_evaluation", "mean_reward")),
        "queue": whole_number(page.get("queue")),
        "tokens_per_second": None if rate is None else max(rate, 0.0),
        "cost": None if cost is None else max(cost, 0.0),
        "bubbles": bubbles(page, spec=spec),
        "checkpoint_path": checkpoint_path(store, _at(page, "checkpoint", "path")),
    }
    return {name: value for name, value in found.items() if value is not None}


def bubbles(page: Mapping[str, Any], *, spec: RLJobSpec) -> Bubbles | None:
    """Shares of the wall over the last heartbeats, each process weighed by what it costs; None while nothing is known."""
    weighed = [(float(spec.trainer.cost_per_hour), _at(page, "scaling", "trainer"))]
    for pool in spec.generators:
        generators = whole_number(_at(page, "scaling", "pools", pool.name, "generators")) or 0
        parts = _at(page, "scaling", "pools", pool.name, "parts")
        weighed.append((generators * float(pool.cost_per_hour), parts))
    known = [(cost, parts) for cost, parts in weighed if cost > 0 and isinstance(parts, Mapping)]
    total = sum(cost for cost, _ in known)
    if total <= 0:
        return None
    pipeline = sum(cost * _share(parts, begin=_PIPELINE) for cost, parts in known) / total
    skew = sum(cost * _share(parts, begin="skew") for cost, parts in known) / total
    return Bubbles(pipeline_percent=_percent(pipeline), skew_percent=_percent(skew))


def _share(parts: Mapping[str, Any], *, begin: str) -> float:
    return sum(_number(share) or 0.0 for part, share in parts.items() if str(part).startswith(begin))


def _percent(share: float) -> float:
    return round(min(max(100 * share, 0.0), 100.0), 1)


def _at(page: Mapping[str, Any], *path: str) -> Any:  # noqa: ANN401 - plain data
    value: Any = page
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value
