"""The stage between finished and scored: a pool with the frozen model says its log-probs of each finished sample.

    finished ─┬─▶ task pool: reward ────────────┬─▶ scored: in the journal, with both
              └─▶ FROZEN POOL: its log-probs ───┘

Owns the samples that wait for the pool, in the order in which they finished, and who of its generators takes which: the one with the
smallest share of its slots taken. Does not own leases (`fleet.py`), nor what follows (`groups/lifecycle.py`).

Invariants: a finished sample waits, or is with one generator under a lease, until its log-probs are there; a lost lease makes it wait again,
first. It has its tokens and its version by then, so what is computed anew is the same. Its group is live and its bytes are in the buffer,
so what bounds admission bounds the stage.
"""

from collections import deque
from collections.abc import Callable

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.effects import Outbox
from streamrl_workers.scheduler.fleet import Fleet, Generator, Lease
from streamrl_workers.scheduler.groups.sample import Sample
from streamrl_workers.scheduler.groups.table import Group, GroupTable
from streamrl_workers.scheduler.kv_memory import KvSize
from streamrl_workers.scheduler.settings import SchedulerSettings
from streamrl_workers.stream.packing import all_finite_32

_NO_MEMORY = KvSize(0, 0)
"""Nothing is kept there between two samples."""


class FrozenStage:
    """Of a job with `trainer.reference`."""

    def __init__(self, settings: SchedulerSettings, outbox: Outbox, *, fleet: Fleet, groups: GroupTable) -> None:
        self._settings = settings
        self._outbox = outbox
        self._fleet = fleet
        self._groups = groups
        self._waiting: deque[tuple[Group, Sample]] = deque()
        self.on_measured: Callable[[Group, Sample], None] = lambda group, sample: None
        """Called when a sample has its log-probs."""
        self.on_failed: Callable[[Group, str], None] = lambda group, error: None
        """Called when a sample cannot have them."""

    def put(self, group: Group, sample: Sample) -> None:
        """The sample has all its tokens."""
        sample.is_measured, sample.issues = False, 0
        self._waiting.append((group, sample))

    def forget(self, group: Group) -> None:
        """The group will not be trained."""
        self._waiting = deque(one for one in self._waiting if one[0] is not group)

    def fill(self) -> None:
        """Give free slots what waits."""
        while self._waiting and self._fleet.free_frozen:
            group, sample = self._waiting.popleft()
            self._issue(group, sample, min(self._fleet.free_frozen.values(), key=_taken))

    def progress(self, lease: Lease, item: pb.Progress) -> None:
        """The log-probs of one sample, or why there are none."""
        group = self._groups[lease.group_id]
        sample = group.samples[lease.sample_index]
        if item.finish_reason == "error":
            self._end(lease, sample)
            self.on_failed(group, f"{lease.generator_id}: {item.error}")
        elif len(item.logprobs) == len(sample.tokens) and all_finite_32(item.logprobs):
            self._end(lease, sample)
            before = sample.size_bytes
            sample.reference, sample.is_measured = item.logprobs, True
            self._groups.buffer(group, sample.size_bytes - before)
            self.on_measured(group, sample)
        else:
            self._outbox.cancel(lease.generator_id, lease.number)
            self.lost(lease)

    def lost(self, lease: Lease) -> None:
        """The lease is revoked: another generator says the same."""
        group = self._groups[lease.group_id]
        sample = group.samples[lease.sample_index]
        self._end(lease, sample)
        if sample.issues < self._settings.max_issues:
            self._waiting.appendleft((group, sample))
        else:
            self.on_failed(
                group, f"log-probs of a sample were lost {sample.issues} times, last with {lease.generator_id}"
            )

    def _issue(self, group: Group, sample: Sample, generator: Generator) -> None:
        self._fleet.reissued += sample.issues > 0
        sample.issues += 1
        lease = self._fleet.lend(generator, group_id=group.group_id, sample_index=sample.index, size=_NO_MEMORY)
        sample.lease = lease.number
        request = pb.SampleRequest(
            lease=lease.number,
            group_id=group.group_id,
            sample_index=sample.index,
            sampling=self._settings.sampling,
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
