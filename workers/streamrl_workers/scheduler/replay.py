"""From records to `Recovered`: what a journal means, as a pure fold.

Owns the meaning; the journal on disk answers the same from its tables.
"""

from collections.abc import Iterable

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler.group_stats import stats_of_stored
from streamrl_workers.scheduler.lengths import LengthHistory


class _Fold:
    """The journal's content so far."""

    def __init__(self) -> None:
        self.planned: dict[int, fx.Planned] = {}
        self.scored: dict[int, fx.Scored] = {}
        self.next_group_id = 0
        self.attempt = 0
        self.instance = ""
        self.checkpoint_step = 0
        self.step = 0
        self.compositions: dict[int, tuple[int, ...]] = {}
        self.evaluated: set[int] = set()
        self.history = LengthHistory()
        self.ended = False

    def apply(self, record: fx.Record) -> None:
        """One more record."""
        match record:
            case fx.Planned():
                self.planned[record.group_id] = record
                self.next_group_id = max(self.next_group_id, record.group_id + 1)
            case fx.Scored():
                self._score(record)
            case fx.Dropped():
                if record.mean_tokens is not None:
                    self._learn(record.group_id, mean_tokens=record.mean_tokens)
                self._forget(record.group_id)
            case fx.AttemptStarted():
                self.attempt, self.instance, self.step = record.attempt, record.instance, record.step
            case fx.StepTaken():
                self.compositions[record.step] = record.group_ids
                self.step = record.step + 1
            case fx.Checkpointed():
                self._checkpoint(record.step)
            case fx.Evaluated():
                self.evaluated.add(record.step)
            case fx.RunEnded():
                self.ended = True

    def _score(self, record: fx.Scored) -> None:
        self.scored[record.group_id] = record
        tokens = [len(pb.Trajectory.FromString(data).tokens) >> 2 for data in record.trajectories]
        if tokens:
            self._learn(record.group_id, mean_tokens=sum(tokens) / len(tokens))

    def _learn(self, group_id: int, *, mean_tokens: float) -> None:
        key = self.planned[group_id].prompt_key
        if key:
            self.history.learn(key, mean_tokens=mean_tokens)

    def _checkpoint(self, step: int) -> None:
        self.checkpoint_step = step
        for covered in [taken for taken in self.compositions if taken < step]:
            for group_id in self.compositions.pop(covered):
                self._forget(group_id)

    def _forget(self, group_id: int) -> None:
        self.planned.pop(group_id)
        self.scored.pop(group_id, None)

    def groups(self) -> tuple[fx.RecoveredGroup, ...]:
        """Groups that are live or in a step that no checkpoint covers."""
        recorded = {group_id for group_ids in self.compositions.values() for group_id in group_ids}
        return tuple(self._group(group, recorded=group.group_id in recorded) for group in self.planned.values())

    def _group(self, planned: fx.Planned, *, recorded: bool) -> fx.RecoveredGroup:
        scored = self.scored.get(planned.group_id)
        blobs = scored.trajectories if scored else ()
        return fx.RecoveredGroup(
            group_id=planned.group_id,
            prompt_index=planned.prompt_index,
            begun_step=scored.begun_step if scored else None,
            trajectories=() if recorded else blobs,
            size_bytes=scored.size_bytes if scored else 0,
            stats=stats_of_stored(blobs, begun=scored.begun_step) if scored and recorded else None,
        )


def replay(records: Iterable[fx.Record]) -> fx.Recovered:
    """What these records, in their order, leave."""
    fold = _Fold()
    for record in records:
        fold.apply(record)
    return fx.Recovered(
        next_group_id=fold.next_group_id,
        attempt=fold.attempt,
        instance=fold.instance,
        checkpoint_step=fold.checkpoint_step,
        step=fold.step,
        groups=fold.groups(),
        compositions=dict(sorted(fold.compositions.items())),
        evaluated_steps=frozenset(fold.evaluated),
        prompt_lengths=fold.history.means(),
        ended=fold.ended,
    )
