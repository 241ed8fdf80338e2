"""In which order a job's pods come: the trainer first, or all at once.

    no pods ─▶ trainer's pods ──all ready──▶ generators and agent hosts ─▶ they stay, whatever the trainer does, until the job has no pods
    a gang  ─▶ all pods at once: its scheduler waits for the last member before it places the first

Owns: what counts as a gang, its sizes, and when pools wait. The memory is the pools' StatefulSets, and what the status says of them.
"""

from collections.abc import Mapping

from streamrl import names
from streamrl.spec import RLJob
from streamrl.spec.pod import Pod
from streamrl.status import RLJobStatus
from streamrl_operator.planning import pods
from streamrl_operator.planning.replicas import bounds
from streamrl_operator.planning.values import Observed

AWAITS_TRAINER = "the trainer is not ready yet"
"""Why a pool has no pods."""
GROUP_KEYS = (
    "scheduling.k8s.io/group-name",
    "scheduling.volcano.sh/group-name",
    "scheduling.x-k8s.io/pod-group",
    "pod-group-name",
)
"""Labels and annotations by which a pod names its group: Volcano, scheduler-plugins, KAI."""


def is_gang(job: RLJob, *, queue: str) -> bool:
    """Whether something waits for the last pod before it places the first."""
    return job.spec.gang is not None or bool(queue) or _names_group(job.spec.trainer.pod)


def _names_group(pod: Pod) -> bool:
    return any(key in pod.labels or key in pod.annotations for key in GROUP_KEYS)


def pool_sizes(job: RLJob) -> dict[str, int]:
    """Pool -> pods without which the job is of no use."""
    return {pool.name: max(1, bounds(pool.scaling)[0]) for pool in job.spec.pools}


def sizes(job: RLJob) -> dict[str, int]:
    """StatefulSet -> pods without which the job is of no use."""
    name = job.metadata.name
    own = {names.trainer(name): 1, names.trainer_workers(name): job.spec.trainer.nodes - 1}
    return own | {names.pool(name, pool): count for pool, count in pool_sizes(job).items()}


def awaits_trainer(observed: Observed, *, before: RLJobStatus) -> bool:
    """Whether no pool is to have pods yet, of a job that is no gang and runs."""
    assert observed.job is not None, "asked only of a valid job"
    trainer = [pod for pod in observed.pods if pods.trains(pod)]
    if len(trainer) >= observed.job.spec.trainer.nodes and all(map(pods.is_ready, trainer)):
        return False
    asked: Mapping[str, int] = {
        pool.name: pods.asked(observed.sets.get(names.pool(observed.name, pool.name)))
        for pool in observed.job.spec.pools
    }
    return not any(asked.values()) and not any(pool.desired for pool in before.pools)
