"""Supervised training: the data set's own answers are the samples, and the trainer measures the loss of the held-out ones.

A group is scored as it is planned. The trainer gets the held-out rows over each connection, once they are complete, and waits with a step
while generators evaluate the weights that it begins with.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.delivery import DeliveryOrder, TrainerLink, Why
from streamrl_workers.scheduler.effects import Outbox
from streamrl_workers.scheduler.generators import Fleet
from streamrl_workers.scheduler.model import Group, GroupEvent, GroupSource, GroupTable
from streamrl_workers.scheduler.rollout import SampleLifecycle
from streamrl_workers.scheduler.settings import SchedulerSettings
from streamrl_workers.stream.archive import is_archived
from streamrl_workers.tasks.values import Demonstration, Prompt

MOST_BYTES = 64 * 2**20
"""Maximum bytes of all held-out rows, which are one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """Rows of the data set: a `GroupSource`."""

    groups: GroupTable
    fleet: Fleet
    lifecycle: SampleLifecycle
    archived_percent: int
    otherwise: GroupSource
    """Makes groups of prompts that have no answer."""
    is_rewarded: bool = True

    def claim(self, number: int) -> int | None:
        """Take every group."""
        return number

    def start(self, group: Group, prompt: Prompt) -> None:
        """Score the group, as if its sample were generated under the weights of the step that is being filled."""
        if (shown := prompt.demonstration) is None:
            self.otherwise.start(group, prompt)
            return
        self.groups.begin(group)
        sample = demonstrated_sample(shown, group_id=group.group_id, version=self.groups.window.step)
        sample.ended_at = self.fleet.epoch_s + self.fleet.now_s
        texts = b""
        if is_archived(group.group_id, share_percent=self.archived_percent):
            texts = group.prompt.texts([demonstrated_texts(shown)])
        self.lifecycle.store(group, [sample], texts=texts)
        self.groups.follow(group, GroupEvent.SUPPLY)


class HeldOutSamples:
    """Sends the held-out rows to the trainer: an `Extension`."""

    def __init__(
        self,
        settings: SchedulerSettings,
        outbox: Outbox,
        *,
        prompts: dict[int, Prompt],
        link: TrainerLink,
        fail: Callable[[str], None],
    ) -> None:
        """`prompts`: held-out prompts that have arrived, by index, in the order of their arrival. `fail`: ends the run with a reason."""
        self._wanted = settings.evaluation.prompts
        self._outbox = outbox
        self._prompts = prompts
        self._link = link
        self._fail = fail
        self._seen = 0
        """Prompts that were looked at."""
        self._rows: dict[int, pb.Sample] = {}
        """Prompt index -> its row."""
        self._size_bytes = 0
        self._sent_over = 0
        """Connection over which they were sent last."""

    def settle(self) -> None:
        """Take the rows that have arrived; send all of them once they are complete, over each connection."""
        if self._seen < len(self._prompts):
            self._take(islice(reversed(self._prompts.values()), len(self._prompts) - self._seen))
        is_complete = bool(self._rows) and len(self._rows) == self._wanted
        if is_complete and self._link.is_open and self._sent_over != self._link.connections:
            self._sent_over = self._link.connections
            held_out = pb.HeldOut(samples=[sample for _, sample in sorted(self._rows.items())])
            self._outbox.to_trainer(pb.TrainerCommand(held_out=held_out))

    def _take(self, prompts: Iterable[Prompt]) -> None:
        """Add rows; end the run as soon as they are too large for one message."""
        for prompt in prompts:
            self._seen += 1
            if prompt.demonstration is not None:
                sample = demonstrated_sample(prompt.demonstration, group_id=prompt.index, version=0)
                self._rows[prompt.index] = sample
                self._size_bytes += sample.ByteSize()
        if self._size_bytes > MOST_BYTES:
            rule = f"the held-out rows must have at most {MOST_BYTES} bytes as tokens, got {self._size_bytes}"
            self._fail(f"spec.task.evaluation.maxPrompts: {rule}; lower it")


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterEvaluation:
    """Waits with a step while the weights that it begins with are evaluated: a `DeliveryOrder`."""

    link: TrainerLink
    is_due: Callable[[int], bool]
    """Returns whether a version must be evaluated."""
    then: DeliveryOrder

    def next(self) -> Group | Why:
        """Return the next group unless the evaluation is due."""
        return Why.EVALUATION if self.is_due(self.link.step) else self.then.next()


def demonstrated_sample(shown: Demonstration, *, group_id: int, version: int) -> pb.Sample:
    """Return the row as a sample: log-probs of zero, because the data set has its tokens with certainty."""
    return pb.Sample(
        group_id=group_id,
        prompt_tokens=shown.prompt_tokens,
        tokens=shown.tokens,
        logprobs=bytes(len(shown.tokens)),
        spans=[pb.VersionSpan(tokens=len(shown.tokens) >> 2, step=version)],
        finish_reason="length" if shown.truncated else "stop",
        reward=shown.reward,
        segments=[
            pb.Segment(
                tokens=segment.tokens,
                observation=segment.kind != "turn",
                context=segment.kind == "context",
                reward=segment.reward,
            )
            for segment in (shown.segments if len(shown.segments) > 1 else ())
        ],
        weight=shown.weight,
    )


def demonstrated_texts(shown: Demonstration) -> pb.SampleTexts:
    """Return the texts of the row for the archive."""
    texts = pb.SampleTexts()
    for segment in shown.segments:
        if segment.kind == "turn":
            texts.observations.extend(
                [""] * (len(texts.turns) - len(texts.observations))
            )  # nothing was read in between
            texts.turns.append(segment.text)
            continue
        if segment.kind == "context":
            texts.contexts.append(len(texts.observations))
        texts.observations.append(segment.text)
    return texts
