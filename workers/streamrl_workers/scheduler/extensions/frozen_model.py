"""The stage between finished and scored: a pool with the frozen model computes its log-probs of each finished sample.

    finished ─┬─▶ task pool: reward ────────────┬─▶ scored: in the journal, with both
              └─▶ FROZEN POOL: its log-probs ───┘

Owns the samples that wait for the pool, in the order in which they finished, and which generator takes which: the one with the smallest share of
its slots taken. Does not own leases (`generators.py`), nor what follows (`rollout.py`).

Invariants: a finished sample waits, or is with one generator under a lease, until its log-probs have arrived; after a lost lease it waits
first in the queue. It has its tokens and its version by then, so a repeated computation gives the same. Its group is live and its bytes are in the buffer, so
what bounds admission bounds the stage.
"""

from collections import deque

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.effects import Outbox
from streamrl_workers.scheduler.generators import Fleet, Generator, KvSize, Lease
from streamrl_workers.scheduler.model import Group, GroupTable
from streamrl_workers.scheduler.rollout import SampleLifecycle
from streamrl_workers.scheduler.sample import Sample
from streamrl_workers.scheduler.settings import SchedulerSettings
from streamrl_workers.stream.packing import all_finite_32

REFERENCE = "reference"
"""What finished samples await here."""
_NO_MEMORY = KvSize(0, 0)
"""The engine keeps nothing between two samples."""


class FrozenModel:
    """Log-probs of the frozen model, for jobs with `trainer.reference`: a `SampleStage`, a `WorkSource` and an `Extension`."""

    def __init__(
        self,
        settings: SchedulerSettings,
        outbox: Outbox,
        *,
        fleet: Fleet,
        groups: GroupTable,
        lifecycle: SampleLifecycle,
    ) -> None:
        self._settings = settings
        self._outbox = outbox
        self._fleet = fleet
        self._groups = groups
        self._waiting: deque[tuple[Group, Sample]] = deque()
        self._lifecycle = lifecycle

    def put(self, group: Group, sample: Sample) -> None:
        """Take a sample that has all its tokens."""
        sample.awaits |= {REFERENCE}
        sample.issues = 0
        self._waiting.append((group, sample))

    def forget(self, group: Group) -> None:
        """Drop the samples of a group that will not be trained."""
        self._waiting = deque(one for one in self._waiting if one[0] is not group)

    def settle(self) -> None:
        """Give free slots what waits."""
        while self._waiting and self._fleet.free_reserved:
            group, sample = self._waiting.popleft()
            self._issue(group, sample, min(self._fleet.free_reserved.values(), key=_taken))

    def progress(self, lease: Lease, item: pb.Progress) -> None:
        """Take the log-probs of one sample, or the engine's error."""
        group = self._groups[lease.group_id]
        sample = group.samples[lease.sample_index]
        if item.finish_reason == "error":
            self._end(lease, sample)
            self._lifecycle.give_up(group, f"{lease.generator_id}: {item.error}")
        elif len(item.logprobs) == len(sample.tokens) and all_finite_32(item.logprobs):
            self._end(lease, sample)
            before = sample.size_bytes
            sample.outcome.reference_logprobs = item.logprobs
            self._groups.buffer(group, sample.size_bytes - before)
            self._lifecycle.received(group, sample, REFERENCE)
        else:
            self._outbox.cancel(lease.generator_id, lease.number)
            self.lost(lease)

    def lost(self, lease: Lease) -> None:
        """Put the sample of a revoked lease first in the queue: another generator computes the same."""
        group = self._groups[lease.group_id]
        sample = group.samples[lease.sample_index]
        self._end(lease, sample)
        if sample.issues < self._settings.max_issues:
            self._waiting.appendleft((group, sample))
        else:
            self._lifecycle.give_up(
                group, f"log-probs of a sample were lost {sample.issues} times, last with {lease.generator_id}"
            )

    def _issue(self, group: Group, sample: Sample, generator: Generator) -> None:
        self._fleet.reissued += sample.issues > 0
        sample.issues += 1
        lease = self._fleet.lend(
            generator, group_id=group.group_id, sample_index=sample.index, size=_NO_MEMORY, source=self
        )
        sample.lease = lease.number
        request = pb.SampleRequest(
            lease=lease.number,
            group_id=group.group_id,
            sample_index=sample.index,
            sampling=group.task.sampling,
            finished=pb.Sample(
                prompt_tokens=sample.prompt_tokens,
                tokens=bytes(sample.tokens),
                segments=[] if sample.turns is None else sample.turns.segments,
            ),
        )
        self._outbox.issue(generator.generator_id, request)

    def _end(self, lease: Lease, sample: Sample) -> None:
        self._fleet.end(lease.number)
        sample.lease = None


def _taken(generator: Generator) -> tuple[float, str]:
    return len(generator.leases) / generator.slots, generator.generator_id
