"""The held-out rows of a supervised job: the trainer measures their loss, so its welcome brings them, and it waits until they are there.

Owns the rows and the hello of the trainer that waits. Does not own when the loss is measured (the trainer), nor answers to held-out
prompts (`evaluation.py`). Bound: all rows together are one message.
"""

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.groups.lifecycle import demonstrated_sample
from streamrl_workers.scheduler.settings import SchedulerSettings
from streamrl_workers.scheduler.trainer_feed import HistoryError
from streamrl_workers.tasks.values import Prompt

MOST_BYTES = 64 * 2**20


class HeldOutSamples:
    """Of one job; of one that is not supervised there are none, and nobody waits."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._wanted = settings.evaluation_prompts if settings.supervised else 0
        self.samples: dict[int, pb.Sample] = {}
        """By prompt index."""
        self._waiting: pb.TrainerHello | None = None

    @property
    def complete(self) -> bool:
        """Whether all are there."""
        return len(self.samples) >= self._wanted

    def check(self) -> None:
        """Raises `HistoryError` if they cannot be sent."""
        size_bytes = sum(sample.ByteSize() for sample in self.samples.values())
        if size_bytes > MOST_BYTES:
            rule = f"the held-out rows must have at most {MOST_BYTES} bytes as tokens, got {size_bytes}"
            raise HistoryError(f"spec.task.evaluation.maxPrompts: {rule}; lower it")

    def arrived(self, prompt: Prompt) -> None:
        """A held-out prompt, perhaps with its answer."""
        if prompt.demonstration is not None and prompt.index < self._wanted:
            self.samples[prompt.index] = demonstrated_sample(prompt.demonstration, group_id=prompt.index, version=0)

    def keeps_waiting(self, hello: pb.TrainerHello | None) -> bool:
        """Whether this trainer has to wait; None: none is connected any more."""
        self._waiting = None if self.complete else hello
        return self._waiting is not None

    def take_waiting(self) -> tuple[pb.TrainerHello, ...]:
        """The trainer that need not wait any more, if there is one."""
        if self._waiting is None or not self.complete:
            return ()
        hello, self._waiting = self._waiting, None
        return (hello,)
