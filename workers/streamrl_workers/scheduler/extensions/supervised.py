"""Supervised training: the data set's own answers are the samples, and the trainer measures the loss of the held-out ones.

A group is scored as it is planned. The trainer gets the held-out rows over each connection, once all of them have come, and waits with a step
while generators evaluate the weights that it begins with.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from streamrl.proto import stream_pb2 as pb
from streamrl.proto.literals import unmarked
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
            prompt_text = unmarked(group.prompt.text)
            texts = pb.GroupTexts(prompt=prompt_text, samples=[demonstrated_texts(shown)]).SerializeToString()
        self.lifecycle.store(group, [sample], texts=texts)
        self.groups.follow(group, GroupEvent.SUPPLY)


class HeldOutSamples:
    """Sends the held-out rows to the trainer: an `Extension`."""

    def __init__(
        self,
        settings: SchedulerSettings,
        outbox: Outbox,
        *,
        prompts: Mapping[int, Prompt],
        link: TrainerLink,
        fail: Callable[[str], None],
    ) -> None:
        """`prompts`: held-out prompts that have come, by index. `fail`: ends the run with a reason."""
        self._wanted = settings.evaluation.prompts
        self._outbox = outbox
        self._prompts = prompts
        self._link = link
        self._fail = fail
        self._message: pb.HeldOut | None = None
        self._sent_over = 0
        """Connection over which they were sent last."""

    def settle(self) -> None:
        """Send the rows once all of them have come, over each connection."""
        if not self._wanted or len(self._prompts) < self._wanted:
            return
        if self._message is None:
            self._message = self._make()
        if self._message.samples and self._link.is_open and self._sent_over != self._link.connections:
            self._sent_over = self._link.connections
            self._outbox.to_trainer(pb.TrainerCommand(held_out=self._message))

    def _make(self) -> pb.HeldOut:
        shown = [(index, prompt.demonstration) for index, prompt in sorted(self._prompts.items())]
        samples = [demonstrated_sample(one, group_id=index, version=0) for index, one in shown if one is not None]
        size_bytes = sum(sample.ByteSize() for sample in samples)
        if size_bytes > MOST_BYTES:
            rule = f"the held-out rows must have at most {MOST_BYTES} bytes as tokens, got {size_bytes}"
            self._fail(f"spec.task.evaluation.maxPrompts: {rule}; lower it")
            return pb.HeldOut()
        return pb.HeldOut(samples=samples if len(samples) == self._wanted else [])


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
