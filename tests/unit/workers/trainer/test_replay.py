"""The replay buffer: what it keeps and draws, that it is counted apart, and that a resumed run draws the same."""

import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.proto import stream_pb2 as pb
from streamrl.step_lines import TRAINER_NUMBERS
from streamrl_workers.stream.packing import pack_float32, pack_int32
from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.engines.torch_engine import TorchEngine
from streamrl_workers.trainer.replay import REPLAYED, ReplayBuffer, create_replay
from streamrl_workers.weights.hashing import tensors_hash
from support.tiny_trainer import tiny_engine, tiny_worker, train_steps
from support.trainer_groups import make_group, trainer_spec

BATCH, GROUP_SIZE = 4, 4  # of `trainer_spec`


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def job(*, algorithm: dict | None = None, **replay):
    constants = {"beta": 0.5, "replay": {"sharePercent": 50, **replay}} if algorithm is None else algorithm
    return trainer_spec(rule="trajectoryBalance", algorithm=constants)


def buffer(**replay) -> ReplayBuffer:
    return create_replay(job(**replay))


def sample(group_id: int, index: int, *, prompt: int, answer: int, reward: float = 0.0) -> pb.Sample:
    return pb.Sample(
        group_id=group_id,
        sample_index=index,
        prompt_tokens=pack_int32([prompt]),
        tokens=pack_int32([answer, 1]),
        logprobs=pack_float32([-1.0, -1.0]),
        spans=[pb.VersionSpan(tokens=2, attempt=1)],
        reward=reward,
    )


def answers(prompt: int, *rewards: float, first: int = 0) -> list[pb.Sample]:
    """Of one prompt, each another text."""
    return [
        sample(prompt, index, prompt=prompt, answer=first + index, reward=reward)
        for index, reward in enumerate(rewards)
    ]


def names(groups: list[pb.Group]) -> list[list[tuple[bytes, bytes]]]:
    return [[(one.prompt_tokens, one.tokens) for one in group.samples] for group in groups]


def steps_of(count: int) -> list[list[pb.Group]]:
    """Two prompts, again and again, with other answers each time."""
    found = []
    for step in range(count):
        groups = [make_group(step * BATCH + number, step=step, seed=step) for number in range(BATCH)]
        for group in groups:
            for one in group.samples:
                one.prompt_tokens = pack_int32([3, group.group_id % 2])
        found.append(groups)
    return found


drawn_samples = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 9), st.floats(-2, 2)), max_size=12
)  # prompt, answer, reward


@given(steps=st.lists(drawn_samples, max_size=6), capacity=st.integers(2, 5), most=st.integers(60, 600), order=st.randoms())  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_what_is_kept_is_bounded_has_no_duplicates_and_knows_no_order_of_arrival(steps, capacity, most, order):
    bounds = {"capacity": capacity, "maxBytes": str(most)}
    one, other = buffer(**bounds), buffer(**bounds)
    for step, drawn in enumerate(steps):
        samples = [sample(step, n, prompt=p, answer=a, reward=r) for n, (p, a, r) in enumerate(drawn)]
        groups = one.draw(step)
        assert names(groups) == names(other.draw(step))
        assert all(group.group_id >= REPLAYED and group.step == step for group in groups)
        assert all(len(set(group)) == len(group) <= GROUP_SIZE for group in names(groups))
        assert all(len({prompt for prompt, _ in group}) == 1 for group in names(groups))
        told = one.admit(step, samples)
        assert told == other.admit(step, order.sample(samples, len(samples)))
        assert told["replay_buffer_bytes"] <= most
        assert told["replay_buffer_samples"] <= 3 * capacity


def test_the_newest_samples_stay_and_one_of_the_same_tokens_counts_once():
    one = buffer(capacity=3, by="Recency")
    one.admit(0, answers(7, 0.1, 0.2, 0.3))
    one.admit(1, answers(7, 0.9))  # the text of the first
    told = one.admit(2, answers(7, 0.5, first=20))
    assert told["replay_buffer_samples"] == 3
    (group,) = one.draw(3)
    assert [one.reward for one in group.samples] == [0.3, 0.9, 0.5]


def test_recency_takes_the_newest_and_reward_prefers_the_best():
    rewards = [5.0, 5.0, *[0.0] * 10]
    recent, best = buffer(by="Recency"), buffer(by="Reward")
    for one in (recent, best):
        one.admit(0, answers(1, *rewards))
    assert [one.tokens for one in recent.draw(1)[0].samples] == [pack_int32([n, 1]) for n in range(8, 12)]
    seen = Counter(one.reward for step in range(1, 50) for group in best.draw(step) for one in group.samples)
    assert seen[5.0] > 90  # of at most 98
    assert seen[0.0] > 90


def test_what_is_kept_does_not_follow_from_who_drew_it():
    one, other = buffer(maxBytes="100"), buffer(maxBytes="100")
    for step in range(3):
        drawn, again = answers(step, 0.0, 1.0, first=step), answers(step, 0.0, 1.0, first=step)
        for lost in again:  # begun anew elsewhere, after deaths of the trainer
            lost.generator_id, lost.spans[0].attempt = "generator-of-a-long-name-0", 2**20
        assert one.admit(step, drawn) == other.admit(step, again)
        assert names(one.draw(step + 1)) == names(other.draw(step + 1))


@pytest.mark.parametrize(("share", "groups"), [(50, 400), (5, 21), (20, 100), (90, 3600)])
def test_the_share_of_replayed_groups_is_exact_over_a_run(share, groups):
    one = buffer(sharePercent=share)
    one.admit(0, [each for prompt in range(40) for each in answers(prompt, 0.0, 1.0)])
    assert sum(len(one.draw(step)) for step in range(100)) == groups


def test_an_unfinished_step_and_a_lone_sample_change_nothing():
    one = buffer()
    one.admit(0, answers(1, 0.0))
    assert one.draw(1) == []
    one.admit(1, answers(2, 0.0, 1.0))
    assert names(one.draw(2)) == names(one.draw(2))
    assert one.admit(2, [])["replay_reuses_max"] == 1.0


def test_replayed_groups_are_trained_besides_the_steps_own_and_counted_apart():
    steps = steps_of(3)
    plain = train_steps(tiny_engine(job(algorithm={"beta": 0.5})), steps)
    engine = tiny_engine(job())
    replaying = train_steps(engine, steps)
    assert replaying[0]["replayed_groups"] == 0
    assert {key.partition("/")[0] for key in replaying[0]} <= set(TRAINER_NUMBERS)
    assert [one["replayed_groups"] for one in replaying[1:]] == [2, 2]  # there are two prompts
    for one, other in zip(replaying, plain, strict=True):
        assert {name: one[name] for name in ("groups", "samples", "tokens", "reward_mean", "staleness_max")} == {
            name: other[name] for name in ("groups", "samples", "tokens", "reward_mean", "staleness_max")
        }
        assert (one["forward_tokens"] > other["forward_tokens"]) == (one["replayed_samples"] > 0)
    assert replaying[2]["replay_reuses_mean"] >= 1.0
    assert replaying[2]["replay_age_mean"] > 0
    assert len(engine.advantages([group.group_id for group in steps[2]])) == 4 * BATCH * GROUP_SIZE


@pytest.mark.parametrize("by", ["Recency", "Reward"])
def test_a_resumed_run_goes_on_as_if_it_had_not_been_killed(by, tmp_path):
    steps = steps_of(6)
    whole = tiny_engine(job(by=by, capacity=6))
    expected = train_steps(whole, steps)
    killed = tiny_engine(job(by=by, capacity=6))
    train_steps(killed, steps[:3])
    killed.save(tmp_path).result()
    train_steps(killed, steps[3:5], first=3)  # lost
    resumed = tiny_engine(job(by=by, capacity=6))
    resumed.load(tmp_path)
    again = [random.Random(step).sample(groups, len(groups)) for step, groups in enumerate(steps[3:])]
    told = train_steps(resumed, again, first=3)
    for one, other in zip(told, expected[3:], strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
        assert {name: value for name, value in one.items() if name.startswith("replay")} == {
            name: value for name, value in other.items() if name.startswith("replay")
        }
    killed.load(tmp_path)
    assert train_steps(killed, steps[3:], first=3)[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=1e-3)
    assert tensors_hash(killed.tensors()) == tensors_hash(whole.tensors())


def test_a_checkpoint_without_a_buffer_loads_into_an_empty_one(tmp_path):
    plain = tiny_engine(job(algorithm={"beta": 0.5}))
    plain.save(tmp_path).result()
    engine = tiny_engine(job())
    train_steps(engine, steps_of(2))
    engine.load(tmp_path)
    assert train_steps(engine, steps_of(1))[0]["replayed_groups"] == 0


def test_two_ranks_train_the_replayed_groups_too():
    steps, spec = steps_of(3), job()

    class Pair:
        size = 2
        workers = (tiny_worker(spec), tiny_worker(spec))

        def call(self, method, payloads):
            return [getattr(worker, method)(payload) for worker, payload in zip(self.workers, payloads, strict=True)]

    pair = train_steps(TorchEngine(Pair(), spec=spec, algorithm=create_algorithm(spec)), steps[:2])
    alone = train_steps(tiny_engine(spec), steps[:2])
    assert pair[0]["loss"] == pytest.approx(alone[0]["loss"], rel=1e-4)
    assert {k: v for k, v in pair[1].items() if k.startswith("replay")} == {
        k: v for k, v in alone[1].items() if k.startswith("replay")
    }
    assert pair[1]["forward_tokens"] == alone[1]["forward_tokens"]
