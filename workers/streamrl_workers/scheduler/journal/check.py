"""`streamrl journal check` and `repair`: proves invariant 1 from the journal and the newest checkpoint alone.

Every planned group is in exactly one step of the effective history, or dropped with one reason, or
live if the run has not ended; never two. Steps are contiguous, hold exactly B groups, none of them
older than S steps; the newest checkpoint that counts names the same groups for each of its steps. Steps that
are compacted are checked by their summary: as many groups as ids, the extremes within the rules, and
one digest chain over their compositions, which the checkpoint's digests must give too.

Owns the rules (`check`, pure), what is read for them (`read_facts`, one consistent view, also of a live run), and what a
repair gives up, which is as little as can be:
    steps that the newest whole checkpoint covers     nothing: they are final, their samples are not needed any more
    the first other step with a damaged group, and
    all steps behind it                               their records: no weights that are kept hold them, they are taken anew
    a damaged group that is left                      its samples: it is planned again, and generated again
Rows that are damaged cannot be repaired: what they said is not known.
"""

import os
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path

from google.protobuf.message import DecodeError

from streamrl.errors import UserError, UserErrors
from streamrl.files import MissingFileError, UnreadableFileError, read_json
from streamrl.keys import DIR_CHECKPOINTS, ENV_STORE_DIR, FILE_JOB, FILE_JOURNAL, FILE_STORE
from streamrl.spec import read_job
from streamrl_workers.scheduler.journal.fingerprint import Fingerprint, read_fingerprint
from streamrl_workers.scheduler.journal.integrity import DamagedJournalError, DamagedSamplesError
from streamrl_workers.scheduler.journal.store import (
    WriterLock,
    newest_checkpoint,
    open_for_reading,
    open_for_writing,
    translated,
    verify,
)
from streamrl_workers.scheduler.journal.tables import (
    CompactedSteps,
    apply_record,
    delete_samples,
    has_ended,
    read_attempts,
    read_compacted,
    read_samples,
    read_steps,
)
from streamrl_workers.scheduler.records import Checkpointed
from streamrl_workers.stream.digests import History, composition_digest, extend_chain, read_count, read_sealed
from streamrl_workers.stream.packing import unpack_int64


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFact:
    """One row of the journal's groups."""

    group_id: int
    start_version: int | None
    drop_reason: str | None
    settled: bool
    samples: int
    """Stored trajectories."""
    damaged: bool = False
    """They are not what was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFact:
    """What a checkpoint on disk says of itself."""

    path: str
    step: int
    attempt: int
    history: History = field(default_factory=History)


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
    """Effective step -> groups, from step `compacted.steps` on."""
    covered_steps: int
    """Steps that a recorded checkpoint covers."""
    ended: bool
    checkpoint: CheckpointFact | None
    """The newest one on disk that counts."""
    damaged: tuple[str, ...] = ()
    """Newer checkpoints that cannot be read, and why: the trainer passes over them."""
    compacted: CompactedSteps = field(default_factory=CompactedSteps)
    """The steps before, and the groups that ended with them."""
    fingerprint: Fingerprint | None = None
    """Of the data; None: the journal has none."""


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
    fingerprint: Fingerprint | None
    violations: tuple[str, ...]
    """At most `MOST_VIOLATIONS`."""


MOST_VIOLATIONS = 1000
"""That are told: a run has none, and a foreign journal any number."""


def check_run(run_dir: Path) -> Report:
    """Check journal and newest checkpoint of a run. Its cost follows from the groups that are not compacted.

    Raises:
        UserError, UserErrors: they cannot be read, or are not what was written.
    """
    with written_by_us(run_dir / FILE_JOURNAL):
        return check(read_facts(run_dir), rules=read_rules(run_dir))


def check(facts: Facts, *, rules: Rules) -> Report:
    """Count, and find every violation, up to `MOST_VIOLATIONS`."""
    owners = {group_id for group_ids in facts.steps.values() for group_id in group_ids}
    dropped = Counter(facts.compacted.dropped)
    dropped.update(group.drop_reason for group in facts.groups.values() if group.drop_reason is not None)
    live = sum(1 for group in facts.groups.values() if group.drop_reason is None and group.group_id not in owners)
    return Report(
        planned=facts.compacted.groups + len(facts.groups),
        consumed=facts.compacted.consumed + len(owners),
        dropped=dict(sorted(dropped.items())),
        live=live,
        steps=facts.compacted.steps + len(facts.steps),
        ended=facts.ended,
        checkpoint=facts.checkpoint,
        fingerprint=facts.fingerprint,
        violations=tuple(islice(_violations(facts, rules), MOST_VIOLATIONS)),
    )


def _violations(facts: Facts, rules: Rules) -> Iterator[str]:
    yield from _compacted_violations(facts.compacted, rules)
    yield from _step_violations(facts, rules)
    yield from _consumption_violations(facts, rules)
    yield from _group_violations(facts, rules)
    yield from _checkpoint_violations(facts)
    yield from (f"{damage}; a run that is resumed passes over it" for damage in facts.damaged)


def _compacted_violations(compacted: CompactedSteps, rules: Rules) -> Iterator[str]:
    ended = compacted.consumed + sum(compacted.dropped.values())
    if compacted.groups != ended:
        yield f"the {compacted.steps} oldest steps have {compacted.groups} groups, but {ended} were consumed or dropped"
    fewest, most = compacted.step_groups or (rules.batch_groups, rules.batch_groups)
    if (fewest, most) != (rules.batch_groups, rules.batch_groups):
        yield f"the {compacted.steps} oldest steps consumed {fewest} to {most} groups each, not {rules.batch_groups}"
    low, high = compacted.staleness or (0, 0)
    if low < 0 or high > rules.staleness:
        yield f"the {compacted.steps} oldest steps have groups of staleness {low} to {high}, allowed {rules.staleness}"


def _step_violations(facts: Facts, rules: Rules) -> Iterator[str]:
    for expected, (step, group_ids) in enumerate(facts.steps.items(), start=facts.compacted.steps):
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
            if group_id in facts.compacted:
                yield f"group {group_id} is in step {step}, but ended before step {facts.compacted.steps}"
                continue
            yield from _use_violations(facts.groups.get(group_id), group_id=group_id, step=step, rules=rules)


def _use_violations(group: GroupFact | None, *, group_id: int, step: int, rules: Rules) -> Iterator[str]:
    if group is None:
        yield f"group {group_id} is in step {step} but was never planned"
        return
    if group.drop_reason is not None:
        yield f"group {group_id} is in step {step} and dropped ({group.drop_reason})"
    if group.start_version is None:
        yield f"group {group_id} is in step {step} but was never scored"
    elif not 0 <= step - group.start_version <= rules.staleness:
        yield f"group {group_id} of step {step} started at version {group.start_version}: staleness {step - group.start_version}, allowed {rules.staleness}"


def _group_violations(facts: Facts, rules: Rules) -> Iterator[str]:
    consumed = {group_id: step for step, group_ids in facts.steps.items() for group_id in group_ids}
    yield from _missing_groups(facts)
    for group_id, group in sorted(facts.groups.items()):
        step = consumed.get(group_id)
        if group.damaged:
            yield f"group {group_id} has samples that are not what was written: `streamrl journal repair` has them generated again"
        live = group.drop_reason is None and step is None
        if live and facts.ended:
            yield f"group {group_id} is still live though the run has ended"
        elif live and group.settled:
            yield f"group {group_id} is nowhere: settled, but neither in a step nor dropped"
        elif not group.damaged and group.drop_reason is None and (step is None or step >= facts.covered_steps):
            yield from _storage_violations(group, rules)


def _missing_groups(facts: Facts) -> Iterator[str]:
    """Ids are dense: rows and compacted groups together leave no gap and meet nowhere."""
    spans = sorted([*facts.compacted.settled, *((group_id, group_id) for group_id in facts.groups)])
    for (_, before), (first, _) in pairwise(spans):
        if first > before + 1:
            yield f"group {before + 1} is missing: group {first} follows group {before}"
        elif first <= before:
            yield f"group {first} ended before step {facts.compacted.steps}, but is there once more"


def _storage_violations(group: GroupFact, rules: Rules) -> Iterator[str]:
    """Samples stay until a checkpoint covers them."""
    if group.start_version is not None and group.samples != rules.group_size:
        yield f"group {group.group_id} has {group.samples} stored samples, not {rules.group_size}, and no checkpoint covers it"


def _checkpoint_violations(facts: Facts) -> Iterator[str]:
    checkpoint = facts.checkpoint
    if checkpoint is None:
        return
    history, named = checkpoint.history, len(checkpoint.history)
    if named != checkpoint.step:
        yield f"{checkpoint.path} names {named} steps, not {checkpoint.step}"
    common = max(history.folded_steps, facts.compacted.steps)
    if common > named:
        yield f"{checkpoint.path} trained {named} steps, but the journal says that {common} can no longer be taken back"
        return
    yield from _chain_violations(checkpoint, facts, common=common)
    for step in range(common, named):
        if step not in facts.steps:
            yield f"{checkpoint.path} trained step {step}, which the journal does not know"
        elif composition_digest(facts.steps[step]) != history.digests[step - history.folded_steps]:
            yield f"{checkpoint.path} trained other groups in step {step} than the journal says"


def _chain_violations(checkpoint: CheckpointFact, facts: Facts, *, common: int) -> Iterator[str]:
    """Both sides' chains, brought to the step that both still have digests from."""
    missing = next((step for step in range(facts.compacted.steps, common) if step not in facts.steps), None)
    if missing is not None:
        yield f"{checkpoint.path} trained step {missing}, which the journal does not know"
        return
    younger = [composition_digest(facts.steps[step]) for step in range(facts.compacted.steps, common)]
    if extend_chain(facts.compacted.chain, digests=younger) != checkpoint.history.chain_at(common):
        yield f"{checkpoint.path} trained other groups in the {common} oldest steps than the journal says"


CHECKPOINT_META = "meta.json"
_CHECKPOINT_GLOB = "step-[0-9]*"


@contextmanager
def written_by_us(path: Path) -> Iterator[None]:
    """Digests are against accidents: whoever knows them writes what no scheduler does, and that is refused in a line too."""
    try:
        yield
    except (UserError, UserErrors):
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError, DecodeError) as error:
        rule = f"holds what no scheduler writes: {type(error).__name__}: {error}"
        raise UserError(field=str(path), rule=rule, fix=DamagedJournalError.fix) from error


@contextmanager
def snapshot(run_dir: Path) -> Iterator[sqlite3.Connection]:
    """A connection whose queries all see the journal at one instant, after all of it has been looked at.

    Raises:
        UserError: the folder or the journal cannot be read, or the journal is not what was written.
    """
    if not run_dir.is_dir():
        raise UserError(
            field=str(run_dir), rule="is not a folder of a run", fix="name the folder that `streamrl run` wrote"
        )
    path = run_dir / FILE_JOURNAL
    connection = open_for_reading(path)
    try:
        with translated(path), written_by_us(path):
            connection.execute("BEGIN")
            verify(connection, path)
            yield connection
    finally:
        connection.close()


def read_rules(run_dir: Path) -> Rules:
    """What the run's job demands."""
    spec = read_job(run_dir / FILE_JOB, beneath=run_dir).spec
    return Rules(
        batch_groups=spec.pipeline.batch_groups, staleness=spec.pipeline.staleness, group_size=spec.task.group_size
    )


def read_facts(run_dir: Path) -> Facts:
    """Everything about the run's history. Checkpoints are read first: the journal is always ahead of them.

    Raises:
        UserError: journal, job or newest checkpoint cannot be read, or the journal is not what was written.
    """
    good, damaged = read_checkpoints(store_of(run_dir) / DIR_CHECKPOINTS)
    with snapshot(run_dir) as connection:
        checkpoint = newest_that_counts(good, read_attempts(connection))
        return Facts(
            groups=read_groups(connection),
            steps={step: ids for step, _, ids in read_steps(connection)},
            compacted=read_compacted(connection),
            covered_steps=newest_checkpoint(connection),
            ended=has_ended(connection),
            fingerprint=read_fingerprint(connection),
            checkpoint=checkpoint,
            damaged=tuple(f"{name}: {why}" for name, why in damaged if checkpoint is None or name > checkpoint.path),
        )


def read_groups(connection: sqlite3.Connection) -> dict[int, GroupFact]:
    """Every group that is not compacted; its samples are compared with their digest."""
    rows = connection.execute("SELECT group_id, begun_step, drop_reason, settled FROM groups").fetchall()
    groups = {}
    for group_id, start_version, drop_reason, settled in rows:
        samples, damaged = 0, False
        try:
            samples = len(read_samples(connection, group_id))
        except DamagedSamplesError:
            damaged = True
        groups[group_id] = GroupFact(
            group_id=group_id,
            start_version=start_version,
            drop_reason=drop_reason,
            settled=bool(settled),
            samples=samples,
            damaged=damaged,
        )
    return groups


def store_of(run_dir: Path) -> Path:
    """What holds the checkpoints: what the trainer has written down, unless the volume is mounted elsewhere here."""
    if told := os.environ.get(ENV_STORE_DIR):
        return Path(told)
    file = run_dir / FILE_STORE
    try:
        store = Path(read_json(file, beneath=run_dir)["path"])
    except MissingFileError:
        return run_dir
    except (KeyError, TypeError):
        raise UserError(field=str(file), rule="must be an object with a text path") from None
    if not store.is_dir():
        raise UserError(
            field=str(file),
            rule="names a directory of checkpoints that is not here",
            got=str(store),
            fix=f"set {ENV_STORE_DIR} to where that volume is mounted",
        )
    return store


def read_checkpoints(directory: Path) -> tuple[list[CheckpointFact], list[tuple[str, str]]]:
    """Those that are whole, newest first; name of each other one, and what is wrong."""
    good: list[CheckpointFact] = []
    damaged: list[tuple[str, str]] = []
    for path in sorted(directory.glob(_CHECKPOINT_GLOB), reverse=True):
        try:
            good.append(_checkpoint(path))
        except (OSError, ValueError, KeyError) as error:
            if isinstance(error, UnreadableFileError) and not good:
                raise  # what the newest one says is not known: no verdict
            if path.exists():  # else an old one that the trainer has just removed
                damaged.append((path.name, f"{CHECKPOINT_META} cannot be read: {error}"))
    return good, damaged


def _checkpoint(path: Path) -> CheckpointFact:
    document = read_sealed(path / CHECKPOINT_META, beneath=path.parent)
    step, attempt = read_count(document, "step"), read_count(document, "attempt")
    return CheckpointFact(path=path.name, step=step, attempt=attempt, history=History.read(document))


def newest_that_counts(checkpoints: list[CheckpointFact], attempts: list[tuple[int, int]]) -> CheckpointFact | None:
    """The newest checkpoint that no later attempt went back behind."""
    for checkpoint in checkpoints:
        later = [start for attempt, start in attempts if attempt > checkpoint.attempt]
        if all(start >= checkpoint.step for start in later):
            return checkpoint
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """What was done."""

    groups: tuple[int, ...]
    """Will be generated again."""
    first_step: int | None
    """This step and those behind it are taken anew; None: no record was given up."""


def repair(run_dir: Path, *, checkpoint: CheckpointFact | None) -> Repair:
    """Give up damaged samples. `checkpoint`: the newest one that is whole; nothing of the run may be running.

    Raises:
        UserError: there is no journal, a scheduler has it, its rows are damaged, or the run has ended.
    """
    path = run_dir / FILE_JOURNAL
    if not path.is_file():
        raise UserError(field=str(path), rule="does not exist", fix="name the folder of a run")
    lock = WriterLock(path)
    lock.acquire()
    try:
        with closing(open_for_writing(path)) as connection, translated(path), written_by_us(path):
            connection.execute("BEGIN IMMEDIATE")
            done = _repair(connection, path=path, checkpoint=checkpoint)
            connection.execute("COMMIT")
            return done
    finally:
        lock.release()


def _repair(connection: sqlite3.Connection, *, path: Path, checkpoint: CheckpointFact | None) -> Repair:
    covering = None if checkpoint is None else newest_that_counts([checkpoint], read_attempts(connection))
    if _damaged(connection) and covering is not None and covering.step > newest_checkpoint(connection):
        covered = Checkpointed(step=covering.step, path=covering.path)
        delete_samples(connection, apply_record(connection, covered))
    damaged = _damaged(connection)
    if damaged and has_ended(connection):
        raise UserError(
            field=str(path),
            rule=f"group {damaged[0]} has damaged samples that no whole checkpoint covers, and the run has ended",
            fix="nothing is left to be trained; use a copy if you need the samples",
        )
    first_step = _give_up_records(connection, damaged)
    connection.executemany(
        "UPDATE groups SET begun_step = NULL, size_bytes = NULL, samples_digest = NULL WHERE group_id = ?",
        [(group_id,) for group_id in damaged],
    )
    delete_samples(connection, damaged)
    return Repair(groups=damaged, first_step=first_step)


def _damaged(connection: sqlite3.Connection) -> tuple[int, ...]:
    """Whose samples somebody may still need."""
    return tuple(group.group_id for group in read_groups(connection).values() if group.damaged and not group.settled)


def _give_up_records(connection: sqlite3.Connection, groups: Collection[int]) -> int | None:
    rows = connection.execute("SELECT step, group_ids FROM steps").fetchall()
    first = min((step for step, ids in rows if not set(groups).isdisjoint(unpack_int64(ids))), default=None)
    connection.execute("DELETE FROM steps WHERE step >= ?", (first,))  # of NULL: none
    return first
