"""Which images a job's pods are of where it names none itself: this operator's on the day when it begins, and those to its end.

All workers of a job must be of one release, and an upgrade must not restart what runs: so the default is taken once, when pods are
first wanted, for trainer and generators together. What was taken is kept in the ConfigMap of the resolved job, which is made before
any pod: an operator that is replaced between two StatefulSets does not mix two releases. Where it is lost and there are pods, the
job's status tells, or else their StatefulSets.
"""

from pydantic import ValidationError

from streamrl import keys, names
from streamrl.spec.pod import Pod
from streamrl.status import Images
from streamrl_operator.planning import stored
from streamrl_operator.planning.values import Object, Observed, Settings


def of_job(observed: Observed, *, settings: Settings, begins: bool) -> Images | None:
    """What was taken, or is taken now if the job `begins`; None: it has not begun."""
    kept = _kept(observed.resolved.get(keys.FILE_IMAGES, ""))
    if kept is not None or not begins:
        return kept
    return _seen(observed, default=settings.images) if _has_pods(observed) else settings.images


def _kept(text: str) -> Images | None:
    try:
        return Images.model_validate_json(text)
    except ValidationError:
        return None


def _has_pods(observed: Observed) -> bool:
    """What has none may be as old as it likes."""
    trainer = observed.sets.get(names.trainer(str(observed.raw["metadata"]["name"]))) or {}
    return bool((trainer.get("spec") or {}).get("replicas"))


def _seen(observed: Observed, *, default: Images) -> Images:
    told, job = stored.job_status(observed.raw).images, observed.job
    assert job is not None, "only a valid job begins"
    if told is not None:
        return told
    name, trainer = job.metadata.name, job.spec.trainer
    pools = [_default_in(observed.sets.get(names.pool(name, pool.name)), pod=pool.pod) for pool in job.spec.generators]
    return Images(
        trainer=_default_in(observed.sets.get(names.trainer(name)), pod=trainer.pod) or default.trainer,
        generator=next((image for image in pools if image), default.generator),
    )


def _default_in(found: Object | None, *, pod: Pod) -> str:
    """The operator's image in a StatefulSet; empty: there is none, or the job names its own."""
    if found is None or pod.image is not None:
        return ""
    return str(found["spec"]["template"]["spec"]["containers"][0]["image"])
