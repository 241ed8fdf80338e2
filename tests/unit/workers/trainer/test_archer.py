"""ArCHer beside its formulas (`test_algorithms.py`): the critic's copy, its warm-up, what replayed episodes teach, a resumed run."""

from collections import Counter

import pytest
import torch

from streamrl.proto import stream_pb2 as pb
from streamrl.step_lines import TRAINER_NUMBERS
from streamrl_workers.scheduler.server.peer_messages import Door, check_trainer
from streamrl_workers.stream.messages import STATES_BYTES
from streamrl_workers.stream.packing import tokens_hash
from streamrl_workers.trainer.replay import REPLAYED, create_replay
from streamrl_workers.weights.hashing import tensors_hash
from support.tiny_trainer import assert_resumes, engine_on, tiny_engine, tiny_worker, train_steps
from support.trainer_groups import branched, multi_turn, trainer_spec

BATCH, GROUP_SIZE = 4, 4  # of `trainer_spec`
WARM_UP = {"critic": {"warmUpSteps": 2, "learningRate": 1e-2}}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def job(**constants):
    constants = {"epochs": 1, "miniBatches": 1} | constants
    return trainer_spec(rule="archer", algorithm=constants)


def steps_of(count: int) -> list[list[pb.Group]]:
    kinds = (multi_turn, branched)
    return [[kinds[n % 2](step * BATCH + n, [0.1, None, 0.9, 0.4]) for n in range(BATCH)] for step in range(count)]


@pytest.mark.parametrize(("rate", "updates"), [(0.1, 1), (0.5, 4), (1.0, 2)])
def test_the_copy_goes_its_share_of_the_way_with_each_update(rate, updates):
    spec = job(critic={"targetRate": rate}, miniBatches=updates)
    worker = tiny_worker(spec)
    critic = worker._critic
    leaders = [[p.detach().clone() for p in (*critic.body.parameters(), *critic.head.parameters())]]
    followers = [p.detach().clone() for p in critic.target.parameters()]
    follow = critic.follow

    def following(share):
        leaders.append([p.detach().clone() for p in (*critic.body.parameters(), *critic.head.parameters())])
        follow(share)

    critic.follow = following
    train_steps(engine_on(worker, spec=spec), steps_of(1))
    assert len(leaders) == 1 + updates
    for moved in leaders[1:]:
        assert any(not torch.equal(p, q) for p, q in zip(moved, leaders[0], strict=True))
        followers = [f + rate * (p - f) for f, p in zip(followers, moved, strict=True)]
    torch.testing.assert_close([p.detach() for p in critic.target.parameters()], followers)


def test_the_critic_learns_alone_at_first():
    engine = tiny_engine(job(**WARM_UP))
    before = tensors_hash(engine.tensors())
    first, second = train_steps(engine, steps_of(2))
    assert tensors_hash(engine.tensors()) == before
    assert first["critic_gradient_norm"] > 0 == first["gradient_norm"]
    assert second["replayed_samples"] > 0
    train_steps(engine, steps_of(3)[2:], first=2)
    assert tensors_hash(engine.tensors()) != before


def test_replayed_episodes_leave_the_policy_alone():
    """Their tokens are in no number of the policy's; the critic learns from them."""
    with_few, with_many = (tiny_engine(job(replay={"sharePercent": share})) for share in (20, 80))
    few, many = (train_steps(engine, steps_of(3)) for engine in (with_few, with_many))
    assert {key.partition("/")[0] for key in many[2]} <= set(TRAINER_NUMBERS)
    assert [one["replayed_groups"] for one in many] == [0, 3, 6]  # 12 of the 16 are due, 3 samples of 4 have a reward
    assert few[1]["forward_tokens"] == many[1]["forward_tokens"] == many[1]["tokens"]
    assert few[1]["loss"] == pytest.approx(
        many[1]["loss"], rel=1e-2
    )  # its advantages are by what the critic has learnt
    assert few[1]["value_loss"] != pytest.approx(many[1]["value_loss"], rel=1e-3)


def test_every_kept_episode_is_as_likely_and_equal_ones_stay():
    buffer = create_replay(job(replay={"sharePercent": 50, "capacity": 12}))
    twins = [multi_turn(1, [0.5, 0.5]).samples[0] for _ in range(20)]
    for number, sample in enumerate(twins):
        sample.group_id = number
    told = buffer.admit(0, twins)
    assert told["replay_buffer_samples"] == 12
    seen = Counter(index for step in range(1, 91) for index in _drawn(buffer, step))
    assert set(seen.values()) == {90}  # all 12 fit into a step
    small = create_replay(job(replay={"sharePercent": 10, "capacity": 12}))
    small.admit(0, twins)
    seen = Counter(index for step in range(900) for index in _drawn(small, step))
    assert len(seen) == 12
    assert max(seen.values()) < 1.5 * min(seen.values())


def _drawn(buffer, step: int) -> list[int]:
    groups = buffer.draw(step)
    assert all(group.group_id >= REPLAYED and len(group.samples) <= GROUP_SIZE for group in groups)
    chosen = [kept for group in buffer._drawn for kept in group]
    return [pb.Sample.FromString(kept.data).group_id for kept in chosen]


def test_states_are_where_turns_begin_and_follow_from_seed_and_step():
    buffers = [create_replay(job(resample={"sharePercent": 60})) for _ in range(2)]
    assert buffers[0].states(0) == []
    samples = [sample for group in steps_of(1)[0] for sample in group.samples if sample.HasField("reward")]
    for buffer in buffers:
        buffer.admit(0, samples)
    states = [state for step in range(60) for state in buffers[0].states(step)]
    assert states == [state for step in range(60) for state in buffers[1].states(step)]
    assert len(states) == 60 * 3  # of the four groups of a step, 60 % rounded up
    assert {(state.prompt_index, state.tokens, state.prompt_hash) for state in states} == {
        (sample.group_id, sample.tokens[: 4 * begin], tokens_hash(sample.prompt_tokens))
        for sample in samples
        for begin in _begins(sample)
    }
    assert create_replay(job()).states(0) == []


@pytest.mark.parametrize("due", [9, 72])
def test_a_step_with_the_largest_states_passes_the_schedulers_door(due):
    """States of a MiB: few are named whole, many as far as they fit."""
    spec = job(resample={"sharePercent": 90})
    spec = spec.model_copy(update={"pipeline": spec.pipeline.model_copy(update={"batch_groups": due * 10 // 9})})
    segments = [pb.Segment(tokens=2**18, observation=True), pb.Segment(tokens=1)]
    buffer = create_replay(spec)
    buffer.admit(0, [pb.Sample(tokens=bytes(2**20 + 4), logprobs=bytes(2**20 + 4), segments=segments)])
    states = buffer.states(0)
    assert len(states) == min(due, STATES_BYTES // (2**20 + 64))
    done = pb.StepDone(step=0, states=states, group_ids=range(2**40, 2**40 + spec.pipeline.batch_groups))
    event = pb.TrainerEvent(hello=pb.TrainerHello(trainer_id="t", instance="i", unrecorded_step=done))
    check_trainer(event)
    door = Door(max_tokens=1, batch_groups=spec.pipeline.batch_groups, resamples=True, newest_step=lambda: 0)
    assert event.ByteSize() < door.trainer_limit_bytes


def _begins(sample: pb.Sample) -> list[int]:
    """Tokens before each turn of the first context."""
    found, place = [], 0
    for segment in sample.segments:
        if segment.context:
            break
        if not segment.observation:
            found.append(place)
        place += segment.tokens
    return found


def test_turns_drawn_anew_are_trained_and_not_kept():
    spec = job(resample={"sharePercent": 50})
    engine = tiny_engine(spec)
    anew = multi_turn(3, [None] * GROUP_SIZE)
    for sample in anew.samples:
        sample.resampled = True
        sample.ClearField("segments")
    (told,) = train_steps(engine, [[*steps_of(1)[0][:3], anew]])
    assert told["replay_buffer_samples"] == told["samples"] - told["masked_samples"] - GROUP_SIZE
    assert told["zero_variance_groups"] == 0
    assert [len(engine.advantages([3])), len(engine.states())] == [4 * GROUP_SIZE, 2]


def test_a_resumed_run_goes_on_as_if_it_had_not_been_killed(tmp_path):
    """The copy and the buffer are of the checkpoint."""
    assert_resumes(job(miniBatches=2, **WARM_UP), steps_of(5), saved_at=3, folder=tmp_path)
