"""Rows of a supervised job, as samples: those to train on, and the held-out ones. The trainer measures the loss of these, so it gets
them behind its welcome, as soon as all are there.

Owns the held-out rows. Does not own who gets them when (`trainer_feed.py`), when the loss is measured (the trainer), nor answers to held-out
prompts (`evaluation.py`). Bound: all held-out rows together are one message.
"""

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.settings import SchedulerSettings
from streamrl_workers.tasks.values import Demonstration, Prompt

MOST_BYTES = 64 * 2**20


class HeldOutSamples:
    """Of one job; of one that is not supervised there are none."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.wanted = settings.evaluation_prompts if settings.supervised else 0
        """So many are to come."""
        self._samples: dict[int, pb.Sample] = {}
        """By prompt index."""
        self._size_bytes = 0

    def arrived(self, prompt: Prompt) -> None:
        """A held-out prompt, perhaps with its answer."""
        if prompt.demonstration is None or prompt.index in self._samples or prompt.index >= self.wanted:
            return
        sample = demonstrated_sample(prompt.demonstration, group_id=prompt.index, version=0)
        self._samples[prompt.index] = sample
        self._size_bytes += sample.ByteSize()

    @property
    def fault(self) -> str:
        """Why they cannot be sent; empty: they can."""
        if self._size_bytes <= MOST_BYTES:
            return ""
        rule = f"the held-out rows must have at most {MOST_BYTES} bytes as tokens, got {self._size_bytes}"
        return f"spec.task.evaluation.maxPrompts: {rule}; lower it"

    def message(self) -> pb.HeldOut | None:
        """All of them, in order; None: some are to come, or there are none."""
        if not self._samples or len(self._samples) < self.wanted:
            return None
        return pb.HeldOut(samples=[sample for _, sample in sorted(self._samples.items())])


def demonstrated_sample(shown: Demonstration, *, group_id: int, version: int) -> pb.Sample:
    """As the trainer takes it: log-probs of zero, since the data set says its tokens with certainty."""
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
    """What the trajectory's readers see."""
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
