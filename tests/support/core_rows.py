"""What the task pool of the world around the core makes: prompts, and the answers of a supervised job's rows."""

from collections.abc import Sequence

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.settings import SchedulerSettings
from streamrl_workers.stream.packing import pack_int32
from streamrl_workers.tasks.values import Demonstration, NeedPrompts, Prompt, ShownSegment


def prompt_text(index: int, *, split: str = "train") -> str:
    """Few different ones."""
    return f"{split} {index % 5}"


def prompts_of(need: NeedPrompts, *, supervised: bool) -> list[Prompt]:
    """As the task pool answers."""
    return [
        Prompt(
            split=need.split,
            index=index,
            text=prompt_text(index, split=need.split),
            demonstration=_demonstration(index) if supervised else None,
        )
        for index in range(need.first_index, need.first_index + need.count)
    ]


def _demonstration(index: int) -> Demonstration:
    """What the data set answers to prompt `index`: its number tells it from all others."""
    count = 1 + index % 3
    turn = ShownSegment(text="1", tokens=count, kind="turn")
    return Demonstration(
        prompt_tokens=pack_int32([index]), tokens=pack_int32([1] * count), segments=(turn,), truncated=False
    )


def is_of_row(sample: pb.Sample, index: int) -> bool:
    shown = _demonstration(index)
    return (sample.prompt_tokens, sample.tokens) == (shown.prompt_tokens, shown.tokens)


def check_held_out(samples: Sequence[pb.Sample], *, job: SchedulerSettings) -> Sequence[pb.Sample]:
    """Those of a supervised job, all of them, in order."""
    assert len(samples) == (job.evaluation.prompts if job.extensions.supervised else 0)
    assert all(is_of_row(sample, index) for index, sample in enumerate(samples))
    return samples
