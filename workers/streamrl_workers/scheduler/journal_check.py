"""Proves invariant 1 from the journal and the newest checkpoint alone. Pure: facts in, findings out.

Every planned group is in exactly one step of the effective history, or dropped with one reason, or
live if the run has not ended; never two. Steps are contiguous, hold exactly B groups, none of them
older than S steps; the newest checkpoint that counts names the same groups for each of its steps.

Owns the rules. Does not own reading (`journal_facts.py`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from streamrl_workers.stream.history import composition_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFact:
    """One row of the journal's groups."""

    group_id: int
    prompt_index: int
    begun_step: int | None
    drop_reason: str | None
    settled: bool
    samples: int
    """Stored trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFact:
    """What a checkpoint on disk says of itself."""

    path: str
    step: int
    attempt: int
    history: tuple[str, ...]
    """Digest of each step's groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the job demands."""

    batch_groups: int
    staleness: int
    group_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that is known about a run's history."""

    groups: Mapping[int, GroupFact]
    steps: Mapping[int, tuple[int, ...]]
    """Effective step -> groups."""
    covered_steps: int
    """Steps that a recorded checkpoint covers."""
    ended: bool
    checkpoint: CheckpointFact | None
    """The newest one on disk that counts."""
    damaged: tuple[str, ...] = ()
    """Checkpoints that cannot be read: the trainer passes over them too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was found."""

    planned: int
    consumed: int
    dropped: Mapping[str, int]
    """Reason -> groups."""
    live: int
    steps: int
    ended: bool
    checkpoint: CheckpointFact | None
    damaged: tuple[str, ...]
    violations: tuple[str, ...]


def check(facts: Facts, *, rules: Rules) -> Report:
    """Count, and find every violation."""
    owners = {group_id for group_ids in facts.steps.values() for group_id in group_ids}
    dropped = Counter(group.drop_reason for group in facts.groups.values() if group.drop_reason is not None)
    live = sum(1 for group in facts.groups.values() if group.drop_reason is None and group.group_id not in owners)
    return Report(
        planned=len(facts.groups),
        consumed=len(owners),
        dropped=dict(sorted(dropped.items())),
        live=live,
        steps=len(facts.steps),
        ended=facts.ended,
        checkpoint=facts.checkpoint,
        damaged=facts.damaged,
        violations=tuple(_violations(facts, rules)),
    )


def _violations(facts: Facts, rules: Rules) -> Iterator[str]:
    yield from _step_violations(facts, rules)
    yield from _consumption_violations(facts, rules)
    yield from _group_violations(facts, rules)
    yield from _checkpoint_violations(facts)


def _step_violations(facts: Facts, rules: Rules) -> Iterator[str]:
    for expected, (step, group_ids) in enumerate(facts.steps.items()):
        if step != expected:
            yield f"step {expected} is missing: step {step} follows step {expected - 1}"
            return
        if len(group_ids) != rules.batch_groups:
            yield f"step {step} consumed {len(group_ids)} groups, not {rules.batch_groups}"


def _consumption_violations(facts: Facts, rules: Rules) -> Iterator[str]:
    seen: dict[int, int] = {}
    for step, group_ids in facts.steps.items():
        for group_id in group_ids:
            if group_id in seen:
                yield f"group {group_id} is in step {seen[group_id]} and in step {step}"
            seen[group_id] = step
            yield from _use_violations(facts.groups.get(group_id), group_id=group_id, step=step, rules=rules)


def _use_violations(group: GroupFact | None, *, group_id: int, step: int, rules: Rules) -> Iterator[str]:
    if group is None:
        yield f"group {group_id} is in step {step} but was never planned"
        return
    if group.drop_reason is not None:
        yield f"group {group_id} is in step {step} and dropped ({group.drop_reason})"
    if group.begun_step is None:
        yield f"group {group_id} is in step {step} but was never scored"
    elif not 0 <= step - group.begun_step <= rules.staleness:
        yield f"group {group_id} of step {step} was begun at version {group.begun_step}: staleness {step - group.begun_step}, allowed {rules.staleness}"


def _group_violations(facts: Facts, rules: Rules) -> Iterator[str]:
    consumed = {group_id: step for step, group_ids in facts.steps.items() for group_id in group_ids}
    expected = min(facts.groups, default=0)
    for group_id, group in sorted(facts.groups.items()):
        if group_id != expected:
            yield f"group {expected} is missing: group {group_id} follows group {expected - 1}"
        expected = group_id + 1
        step = consumed.get(group_id)
        live = group.drop_reason is None and step is None
        if live and facts.ended:
            yield f"group {group_id} is still live though the run has ended"
        elif live and group.settled:
            yield f"group {group_id} is nowhere: settled, but neither in a step nor dropped"
        elif group.drop_reason is None and (step is None or step >= facts.covered_steps):
            yield from _storage_violations(group, rules)


def _storage_violations(group: GroupFact, rules: Rules) -> Iterator[str]:
    """Samples stay until a checkpoint covers them."""
    if group.begun_step is not None and group.samples != rules.group_size:
        yield f"group {group.group_id} has {group.samples} stored samples, not {rules.group_size}, and no checkpoint covers it"


def _checkpoint_violations(facts: Facts) -> Iterator[str]:
    checkpoint = facts.checkpoint
    if checkpoint is None:
        return
    if len(checkpoint.history) != checkpoint.step:
        yield f"{checkpoint.path} names {len(checkpoint.history)} steps, not {checkpoint.step}"
    for step, digest in enumerate(checkpoint.history):
        if step not in facts.steps:
            yield f"{checkpoint.path} trained step {step}, which the journal does not know"
        elif composition_digest(facts.steps[step]) != digest:
            yield f"{checkpoint.path} trained other groups in step {step} than the journal says"
