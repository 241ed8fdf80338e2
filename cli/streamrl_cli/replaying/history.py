"""The steps of a run as its samples tell them: the groups of each in their order, its micro-steps, the version that it began with.

Owns what must be there for that. Does not own reading the samples (`scheduler/journal/sample_store.py`), nor training.
Steps that were taken back are none of these: what counts is the history of the newest weights.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from streamrl.errors import UserError
from streamrl.keys import FILE_JOB
from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJob, read_job
from streamrl_workers.scheduler.journal.adoption import read_adopted
from streamrl_workers.scheduler.journal.check import store_of
from streamrl_workers.scheduler.journal.sample_store import StoredGroup, open_samples

_FIX = "a run can be told again while all of its samples are there: storage.archive with sharePercent 100, and maxBytes for all of them"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryStep:
    """A step that counts."""

    step: int
    attempt: int
    groups: tuple[StoredGroup, ...]
    """In the order in which the trainer got them."""
    micro_steps: tuple[int, ...]
    """Groups that had come when each micro-step took what waited, as of `StepDone`."""
    cuts: pb.PassCuts = field(default_factory=pb.PassCuts)
    """Cuts of its passes to the memory, as of `StepDone`."""
    version_hash: bytes
    """Of version `step`, which it began with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """All steps of a run, from 0 on."""

    job: RLJob
    steps: tuple[HistoryStep, ...]
    last_hash: bytes
    """Hash of the version that the last step made; empty: the run has not recorded it."""

    def hash_of(self, version: int) -> bytes:
        """Of a version; empty: it is not known."""
        return self.steps[version].version_hash if version < len(self.steps) else self.last_hash


def read_history(run_dir: Path, *, end: int | None = None) -> RunHistory:
    """The steps before `end`; None: all that are recorded. Also while the run goes on.

    Raises:
        UserError: the folder is none of a run, or began with another's checkpoint, or does not have all samples of these steps.
    """
    if adopted := read_adopted(store_of(run_dir)):
        rule = f"began with step {adopted.step} of run {adopted.run}, so it has no samples of the steps before"
        raise UserError(field=str(run_dir), rule=rule, fix="name a run that began with its own initial model")
    with open_samples(run_dir) as store:
        job = read_job(run_dir / FILE_JOB, beneath=run_dir)
        if not job.spec.storage.archive.share_percent:
            raise UserError(field=str(run_dir), rule="has no archive (storage.archive.sharePercent is 0)", fix=_FIX)
        taken: defaultdict[int, list[StoredGroup]] = defaultdict(list)
        later, next_hash = False, b""
        for group in store.groups():
            if group.head.HasField("step"):
                if end is None or group.head.step < end:
                    taken[group.head.step].append(group)
                    continue
                later = True
                if (
                    group.head.step == end
                ):  # it began with the version that the step before made; its first group has the hash
                    next_hash = next_hash or group.head.version_hash
        last_hash = next_hash if later else store.last_hash
    if not taken:
        raise UserError(field=str(run_dir), rule="has no samples of a step", fix=_FIX)
    batch = job.spec.pipeline.batch_groups
    steps = tuple(_step(run_dir, step, taken.get(step, []), batch=batch) for step in range(max(taken) + 1))
    return RunHistory(job=job, steps=steps, last_hash=last_hash)


def _step(run_dir: Path, step: int, found: list[StoredGroup], *, batch: int) -> HistoryStep:
    if len(found) != batch:
        rule = f"has the samples of {len(found)} of the {batch} groups of step {step}"
        raise UserError(field=str(run_dir), rule=rule, fix=_FIX)
    if not all(group.head.HasField("position") for group in found):
        rule = f"does not say in which order step {step} took its groups: an earlier release has written it"
        raise UserError(field=str(run_dir), rule=rule, fix="use a run of this release")
    groups = sorted(found, key=lambda group: group.head.position)
    numbers = [group.head.micro_step for group in groups]
    rises = [behind - before for before, behind in pairwise([0, *numbers])]
    if [group.head.position for group in groups] != list(range(batch)) or not {0, 1}.issuperset(rises):
        raise UserError(
            field=str(run_dir), rule=f"holds a step {step} that none has taken", fix="restore it from a copy"
        )
    return HistoryStep(
        step=step,
        attempt=groups[0].head.attempt,
        groups=tuple(groups),
        micro_steps=tuple(place for place, rise in enumerate(rises) if rise),
        cuts=groups[0].head.cuts,
        version_hash=groups[0].head.version_hash,
    )
