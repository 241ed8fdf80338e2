"""Messages in frames, and the bounds of specification and protocol side by side."""

import pytest
from annotated_types import Le
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl.spec.base import SpecModel
from streamrl.spec.generators import SimulatedEngineSpec
from streamrl.spec.task import MAX_SAMPLE_TOKENS, EnvironmentSpec, Sampling
from streamrl.spec.training import Pipeline
from streamrl_workers.scheduler.server import peer_messages
from streamrl_workers.stream import messages
from streamrl_workers.stream.messages import FRAME_BYTES, MESSAGE_BYTES, PROMPT_BYTES, Joiner, ProtocolError, frames
from streamrl_workers.stream.packing import BATCH_BYTES, batches

UTF8_BYTES = 4
"""Of a character, and of a token id; tokens of a text are at most its bytes."""


def text(size: int) -> pb.GeneratorCommand:
    return pb.GeneratorCommand(stop=pb.Stop(reason="x" * size))


@given(st.lists(st.integers(0, 3 * FRAME_BYTES), max_size=5))
def test_messages_arrive_as_they_were_sent(sizes: list[int]) -> None:
    joiner, sent = Joiner(pb.GeneratorCommand), [text(size) for size in sizes]
    cut = [frame for message in sent for frame in frames(message.SerializeToString())]
    assert all(frame.ByteSize() <= FRAME_BYTES + 16 for frame in cut)
    assert [message for frame in cut if (message := joiner.take(frame)) is not None] == sent


def test_a_message_beyond_the_bound_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    joiner = Joiner(pb.GeneratorCommand, limit_bytes=FRAME_BYTES)
    first, *_ = frames(text(2 * FRAME_BYTES).SerializeToString())
    assert joiner.take(first) is None
    with pytest.raises(ProtocolError, match="a GeneratorCommand of more than"):
        joiner.take(first)
    monkeypatch.setattr(messages, "MESSAGE_BYTES", 10)
    with pytest.raises(UserError, match="must have at most 10 bytes, got 25; lower maxTokens"):
        list(frames(bytes(25)))


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(ProtocolError, match="3 bytes that are no GeneratorCommand"):
        Joiner(pb.GeneratorCommand).take(pb.Frame(data=b"\xff\xff\xff"))


@given(st.lists(st.integers(0, 2 * BATCH_BYTES)))
def test_batches_hold_all_in_order_within_the_bound(sizes: list[int]) -> None:
    made = list(batches(sizes, size_bytes=int))
    assert [size for batch in made for size in batch] == sizes
    assert all(sum(batch) <= BATCH_BYTES or len(batch) == 1 for batch in made)


def most(model: type[SpecModel], field: str) -> int:
    """The specification's upper bound of a field."""
    (bound,) = [entry.le for entry in model.model_fields[field].metadata if isinstance(entry, Le)]
    return int(bound)  # type: ignore[call-overload]


def test_the_largest_sample_of_the_specification_fits_a_message() -> None:
    """Every message holds at least one sample whole; what holds more is cut into batches."""
    max_tokens, max_chars = most(Sampling, "max_tokens"), most(EnvironmentSpec, "max_observation_chars")
    turns = MAX_SAMPLE_TOKENS * UTF8_BYTES  # were all of it observations in the longest characters
    prompt_tokens = PROMPT_BYTES
    trajectory = 8 * max(turns, max_tokens) + 4 * prompt_tokens
    request = PROMPT_BYTES + 4 * max(turns, max_tokens) + UTF8_BYTES * max_chars
    progress = peer_messages.Door(max_tokens=max_tokens, batch_groups=1, newest_step=lambda: 0).generator_limit_bytes
    margin = 2**20
    assert max(trajectory, request, progress) + margin <= MESSAGE_BYTES


def test_what_the_specification_allows_passes_the_door() -> None:
    slots, groups = most(SimulatedEngineSpec, "slots"), most(Pipeline, "batch_groups")
    hello = pb.GeneratorHello(generator_id="g" * 63 + ".a-1", instance="f" * 32, pool="p" * 50, slots=slots)
    peer_messages.check_generator(pb.GeneratorEvent(hello=hello), newest_step=0)
    ids = range(2**40, 2**40 + groups)
    step = pb.StepDone(step=1, group_ids=ids, metrics={f"metric {n}": float("inf") for n in range(100)})
    event = pb.TrainerEvent(
        hello=pb.TrainerHello(trainer_id="trainer-0", instance="f" * 32, held_groups=ids, unrecorded_step=step)
    )
    peer_messages.check_trainer(event)
    limit = peer_messages.Door(max_tokens=1, batch_groups=groups, newest_step=lambda: 0).trainer_limit_bytes
    assert event.ByteSize() < limit
