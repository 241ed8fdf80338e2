"""The stage between finished and scored, through the core's public methods."""

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler import records as rec
from streamrl_workers.stream.packing import pack_float32
from support.core_events import end_samples, read_inbox, world
from support.core_world import World

FROZEN = ("f0", "f1")


def finished(**changes) -> World:
    """A run with two generators of four slots that have the frozen model; all that the third had is finished and rewarded."""
    run = world(slots=4, reference_pool="f", **changes)
    for name in FROZEN:
        run.join_generator(name, pool="f")
    end_samples(run)
    for name in FROZEN:
        read_inbox(run, name)
    return run


def held(run: World, name: str) -> dict[tuple[int, int], int]:
    """Group and sample -> lease."""
    return {(one.group_id, one.sample_index): lease for lease, one in run.generators[name].active.items()}


def scored(run: World) -> list[pb.Sample]:
    run.commit(len(run.unsynced))
    records = [record for record in run.durable if isinstance(record, rec.Scored)]
    return [pb.Sample.FromString(data) for record in records for data in record.trajectories]


def answer(run: World, name: str, lease: int, **item) -> None:
    """The last word of a generator on one sample."""
    run.generators[name].active.pop(lease, None)
    run.do(run.core.generator_progress(name, items=[pb.Progress(lease=lease, **item)], now_s=run.now_s))


def test_samples_are_shared_out_and_scored_once_both_are_there():
    run = finished()
    assert [len(held(run, name)) for name in FROZEN] == [2, 2]
    assert scored(run) == []
    for name in FROZEN:
        end_samples(run, name)
    assert len(scored(run)) == 4
    assert all(len(sample.reference_logprobs) == len(sample.tokens) > 0 for sample in scored(run))


def test_what_a_dead_generator_held_goes_to_another_with_the_same_tokens():
    run = finished()
    lost = {key: run.generators["f0"].active[lease].finished for key, lease in held(run, "f0").items()}
    run.kill_generator("f0")
    read_inbox(run, "f1")
    again = {key: run.generators["f1"].active[lease].finished for key, lease in held(run, "f1").items()}
    assert lost.items() <= again.items()
    assert run.core.view().reissued_samples == len(lost) == 2


def test_late_words_of_a_lost_lease_are_ignored():
    run = finished()
    ((_, lease), *_) = held(run, "f0").items()
    tokens = run.generators["f0"].active[lease].finished.tokens
    run.kill_generator("f0")
    run.join_generator("f0", pool="f")
    answer(run, "f0", lease, logprobs=bytes(len(tokens)), finish_reason="stop")
    assert run.core.view().ignored_progress == 1
    assert scored(run) == []


@pytest.mark.parametrize("logprobs", [b"", bytes(400), pack_float32([float("nan")])], ids=["none", "more", "nan"])
def test_log_probs_that_cannot_be_are_asked_for_again(logprobs: bytes):
    run = finished()
    key, lease = next(iter(held(run, "f0").items()))
    answer(run, "f0", lease, logprobs=logprobs, finish_reason="stop")
    for name in FROZEN:
        read_inbox(run, name)
    assert lease not in {*held(run, "f0").values(), *held(run, "f1").values()}
    assert key in held(run, "f0") | held(run, "f1")


def test_a_sample_that_the_model_cannot_take_drops_its_group():
    run = finished()
    (group, _), lease = next(iter(held(run, "f0").items()))
    answer(run, "f0", lease, finish_reason="error", error="too long")
    run.commit(len(run.unsynced))
    for name in FROZEN:
        read_inbox(run, name)
    assert group not in {key[0] for name in FROZEN for key in held(run, name)}
    (dropped,) = (record for record in run.durable if isinstance(record, rec.Dropped))
    assert (dropped.group_id, dropped.reason) == (group, "generation_failed")


def test_no_order_and_no_version_is_for_the_pool():
    run = finished()
    assert run.core.view().fleet.generators == 1
    assert set(run.core.view().pools) == {"p", "f"}
    assert all(run.generators[name].wanted is None and not run.generators[name].idle for name in FROZEN)
