"""Proves invariant 1 from the journal and the newest checkpoint alone. Pure: facts in, findings out.

Every planned group is in exactly one step of the effective history, or dropped with one reason, or
live if the run has not ended; never two. Steps are contiguous, hold exactly B groups, none of them
older than S steps; the newest checkpoint that counts names the same groups for each of its steps. Steps that
compaction has folded are checked by their summary: as many groups as ids, the extremes within the rules, and
one digest chain over their compositions, which the checkpoint's digests must give too.

Owns the rules. Does not own reading (`journal_facts.py`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from streamrl_workers.scheduler.journal_folded import Folded
from streamrl_workers.stream.history import EMPTY_CHAIN, composition_digest, extend_chain


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
    """Digest of each step's groups, from step `folded_steps` on."""
    folded_steps: int = 0
    chain: str = EMPTY_CHAIN
    """Of the steps before (`stream/history.py`)."""


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
    """Effective step -> groups, from step `folded.steps` on."""
    covered_steps: int
    """Steps that a recorded checkpoint covers."""
    ended: bool
    checkpoint: CheckpointFact | None
    """The newest one on disk that counts."""
    damaged: tuple[str, ...] = ()
    """Checkpoints that cannot be read: the trainer passes over them too."""
    folded: Folded = field(default_factory=Folded)
    """The steps before, and the groups that ended with them."""


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
    dropped = Counter(facts.folded.dropped)
    dropped.update(group.drop_reason for group in facts.groups.values() if group.drop_reason is not None)
    live = sum(1 for group in facts.groups.values() if group.drop_reason is None and group.group_id not in owners)
    return Report(
        planned=facts.folded.groups + len(facts.groups),
        consumed=facts.folded.consumed + len(owners),
        dropped=dict(sorted(dropped.items())),
        live=live,
        steps=facts.folded.steps + len(facts.steps),
        ended=facts.ended,
        checkpoint=facts.checkpoint,
        damaged=facts.damaged,
        violations=tuple(_violations(facts, rules)),
    )


def _violations(facts: Facts, rules: Rules) -> Iterator[str]:
    yield from _folded_violations(facts.folded, rules)
    yield from _step_violations(facts, rules)
    yield from _consumption_violations(facts, rules)
    yield from _group_violations(facts, rules)
    yield from _checkpoint_violations(facts)


def _folded_violations(folded: Folded, rules: Rules) -> Iterator[str]:
    ended = folded.consumed + sum(folded.dropped.values())
    if folded.groups != ended:
        yield f"the {folded.steps} oldest steps have {folded.groups} groups, but {ended} were consumed or dropped"
    fewest, most = folded.step_groups or (rules.batch_groups, rules.batch_groups)
    if (fewest, most) != (rules.batch_groups, rules.batch_groups):
        yield f"the {folded.steps} oldest steps consumed {fewest} to {most} groups each, not {rules.batch_groups}"
    low, high = folded.staleness or (0, 0)
    if low < 0 or high > rules.staleness:
        yield f"the {folded.steps} oldest steps have groups of staleness {low} to {high}, allowed {rules.staleness}"


def _step_violations(facts: Facts, rules: Rules) -> Iterator[str]:
    for expected, (step, group_ids) in enumerate(facts.steps.items(), start=facts.folded.steps):
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
            if group_id in facts.folded:
                yield f"group {group_id} is in step {step}, but ended before step {facts.folded.steps}"
                continue
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
    yield from _missing_groups(facts)
    for group_id, group in sorted(facts.groups.items()):
        step = consumed.get(group_id)
        live = group.drop_reason is None and step is None
        if live and facts.ended:
            yield f"group {group_id} is still live though the run has ended"
        elif live and group.settled:
            yield f"group {group_id} is nowhere: settled, but neither in a step nor dropped"
        elif group.drop_reason is None and (step is None or step >= facts.covered_steps):
            yield from _storage_violations(group, rules)


def _missing_groups(facts: Facts) -> Iterator[str]:
    """Ids are dense: rows and folded groups together leave no gap and meet nowhere."""
    spans = sorted([*facts.folded.settled, *((group_id, group_id) for group_id in facts.groups)])
    for (_, before), (first, _) in pairwise(spans):
        if first > before + 1:
            yield f"group {before + 1} is missing: group {first} follows group {before}"
        elif first <= before:
            yield f"group {first} ended before step {facts.folded.steps}, but is there once more"


def _storage_violations(group: GroupFact, rules: Rules) -> Iterator[str]:
    """Samples stay until a checkpoint covers them."""
    if group.begun_step is not None and group.samples != rules.group_size:
        yield f"group {group.group_id} has {group.samples} stored samples, not {rules.group_size}, and no checkpoint covers it"


def _checkpoint_violations(facts: Facts) -> Iterator[str]:
    checkpoint = facts.checkpoint
    if checkpoint is None:
        return
    named = checkpoint.folded_steps + len(checkpoint.history)
    if named != checkpoint.step:
        yield f"{checkpoint.path} names {named} steps, not {checkpoint.step}"
    common = max(checkpoint.folded_steps, facts.folded.steps)
    if common > named:
        yield f"{checkpoint.path} trained {named} steps, but the journal says that {common} can no longer be taken back"
        return
    yield from _chain_violations(checkpoint, facts, common=common)
    for step in range(common, named):
        digest = checkpoint.history[step - checkpoint.folded_steps]
        if step not in facts.steps:
            yield f"{checkpoint.path} trained step {step}, which the journal does not know"
        elif composition_digest(facts.steps[step]) != digest:
            yield f"{checkpoint.path} trained other groups in step {step} than the journal says"


def _chain_violations(checkpoint: CheckpointFact, facts: Facts, *, common: int) -> Iterator[str]:
    """Both sides' chains, brought to the step that both still have digests from."""
    missing = [step for step in range(facts.folded.steps, common) if step not in facts.steps]
    if missing:
        yield f"{checkpoint.path} trained step {missing[0]}, which the journal does not know"
        return
    younger = [composition_digest(facts.steps[step]) for step in range(facts.folded.steps, common)]
    ours = extend_chain(facts.folded.chain, digests=younger)
    theirs = extend_chain(checkpoint.chain, digests=checkpoint.history[: common - checkpoint.folded_steps])
    if ours != theirs:
        yield f"{checkpoint.path} trained other groups in the {common} oldest steps than the journal says"
