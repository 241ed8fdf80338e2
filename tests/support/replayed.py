"""From records to `Recovered`: what a journal means, as a pure fold.

Owns the meaning; the journal on disk answers the same from its tables.
"""

from collections.abc import Iterable

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.lengths import LengthHistory
from streamrl_workers.scheduler.model import stats_of_stored


class _Fold:
    """The journal's content so far."""

    def __init__(self) -> None:
        self.planned: dict[int, rec.Planned] = {}
        self.scored: dict[int, rec.Scored] = {}
        self.next_group_id = 0
        self.attempt = 0
        self.instance = ""
        self.checkpoint_step = 0
        self.step = 0
        self.compositions: dict[int, tuple[int, ...]] = {}
        self.cuts: dict[int, bytes] = {}
        self.evaluated: set[int] = set()
        self.history = LengthHistory()
        self.ended = False

    def apply(self, record: rec.Record) -> None:
        """One more record."""
        match record:
            case rec.Planned():
                self.planned[record.group_id] = record
                self.next_group_id = max(self.next_group_id, record.group_id + 1)
            case rec.Scored():
                self._score(record)
            case rec.Dropped():
                if record.mean_tokens is not None:
                    self._learn(record.group_id, mean_tokens=record.mean_tokens)
                self._forget(record.group_id)
            case rec.AttemptStarted():
                self.attempt, self.instance, self.step = record.attempt, record.instance, record.step
            case rec.StepTaken():
                self.compositions[record.step] = record.group_ids
                self.cuts[record.step] = record.cuts
                self.step = record.step + 1
            case rec.Checkpointed():
                self._checkpoint(record.step)
            case rec.Evaluated():
                self.evaluated.add(record.step)
            case rec.RunEnded():
                self.ended = True

    def _score(self, record: rec.Scored) -> None:
        self.scored[record.group_id] = record
        tokens = [len(pb.Sample.FromString(data).tokens) >> 2 for data in record.trajectories]
        if tokens:
            self._learn(record.group_id, mean_tokens=sum(tokens) / len(tokens))

    def _learn(self, group_id: int, *, mean_tokens: float) -> None:
        key = self.planned[group_id].prompt_key
        if key:
            self.history.learn(key, mean_tokens=mean_tokens)

    def _checkpoint(self, step: int) -> None:
        self.checkpoint_step = step
        for covered in [taken for taken in self.compositions if taken < step]:
            self.cuts.pop(covered)
            for group_id in self.compositions.pop(covered):
                self._forget(group_id)

    def _forget(self, group_id: int) -> None:
        self.planned.pop(group_id)
        self.scored.pop(group_id, None)

    def groups(self) -> tuple[rec.RecoveredGroup, ...]:
        """Groups that are live or in a step that no checkpoint covers."""
        recorded = {group_id for group_ids in self.compositions.values() for group_id in group_ids}
        return tuple(self._group(group, recorded=group.group_id in recorded) for group in self.planned.values())

    def _group(self, planned: rec.Planned, *, recorded: bool) -> rec.RecoveredGroup:
        scored = self.scored.get(planned.group_id)
        blobs = scored.trajectories if scored else ()
        return rec.RecoveredGroup(
            group_id=planned.group_id,
            prompt_index=planned.prompt_index,
            start_version=scored.start_version if scored else None,
            trajectories=() if recorded else blobs,
            size_bytes=scored.size_bytes if scored else 0,
            stats=stats_of_stored(blobs) if scored else None,
        )


def replay(records: Iterable[rec.Record]) -> rec.Recovered:
    """What these records, in their order, leave."""
    fold = _Fold()
    for record in records:
        fold.apply(record)
    return rec.Recovered(
        next_group_id=fold.next_group_id,
        attempt=fold.attempt,
        instance=fold.instance,
        checkpoint_step=fold.checkpoint_step,
        step=fold.step,
        groups=fold.groups(),
        compositions=dict(sorted(fold.compositions.items())),
        cuts={step: cuts for step, cuts in fold.cuts.items() if cuts},
        evaluated_steps=frozenset(fold.evaluated),
        prompt_lengths=fold.history.means(),
        ended=fold.ended,
    )
