"""Several updates of one batch, the critic's start, dummies, divergence that is only measured, learning rates."""

import math
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.step_lines import TRAINER_NUMBERS
from streamrl_workers.stream.packing import pack_float32, unpack_float32
from streamrl_workers.trainer.algorithms import ALGORITHMS, create_algorithm
from streamrl_workers.trainer.algorithms.algorithm import ModelTurn, TokenView
from streamrl_workers.trainer.algorithms.objective import normalised, token_rewards
from streamrl_workers.trainer.algorithms.ppo import generalised
from streamrl_workers.trainer.engines.optimiser import learning_rate
from streamrl_workers.trainer.engines.packing import pack_sample
from streamrl_workers.trainer.engines.process_group import SingleRank
from streamrl_workers.trainer.engines.torch_engine import TorchEngine
from streamrl_workers.weights.hashing import tensors_hash
from support.tiny_trainer import engine_on, tiny_engine, tiny_worker
from support.trainer_groups import branched, make_group, trainer_spec

reals = st.floats(-4, 4)
RULES = {
    "grpo": {"referenceKl": {"coefficient": 0.1}},
    "drGrpo": {},
    "dapo": {"overlong": {"bufferTokens": 8}},
    "rloo": {},
    "gspo": {"clipLow": 0.3, "clipHigh": 0.3},
    "reinforcePP": {"epochs": 2, "miniBatches": 3, "referenceKl": {}},
    "ppo": {"epochs": 2, "miniBatches": 2, "referenceKl": {}},
    "trajectoryBalance": {"beta": 0.1},
    "distillation": {"teacher": {"path": {"directory": "teacher"}}, "rewardWeight": 1.0},
    "archer": {"epochs": 2, "miniBatches": 2, "referenceKl": {}},
    "supervised": {},
}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def _groups():
    return [make_group(1), make_group(2, rewards=[1.0, None, 0.0]), make_group(4, rewards=[0.2, 0.9])]


def _step(engine, *, step=0, groups=None):
    engine.begin_step(step, attempt=1)
    engine.add(_groups() if groups is None else groups)
    return engine.finish_step()


def test_every_rule_has_the_same_metrics_and_moves_the_weights():
    assert set(RULES) == set(ALGORITHMS)
    seen = {}
    for rule, constants in RULES.items():
        engine = tiny_engine(trainer_spec(rule=rule, algorithm=constants))
        before = tensors_hash(engine.tensors())
        seen[rule] = _step(engine)
        assert tensors_hash(engine.tensors()) != before
        assert all(math.isfinite(value) for value in seen[rule].values()), rule
    keys = {rule: set(metrics) for rule, metrics in seen.items()}
    by_pool = {key for key in keys["grpo"] if "/" in key}  # differences to a generator, where one drew the samples
    keys["supervised"] |= by_pool
    keys["archer"] = {key for key in keys["archer"] if not key.startswith("replay")}
    assert all(found == keys["grpo"] for found in keys.values())
    assert {key.partition("/")[0] for key in keys["grpo"]} <= set(TRAINER_NUMBERS)
    assert {rule: metrics["updates"] for rule, metrics in seen.items() if metrics["updates"] != 1} == {
        "reinforcePP": 6,
        "ppo": 4,
    }
    assert seen["ppo"]["value_loss"] > 0 == seen["grpo"]["value_loss"]
    assert seen["ppo"]["critic_gradient_norm"] > 0
    assert seen["grpo"]["reference_kl"] > 0 == seen["drGrpo"]["reference_kl"]


@pytest.mark.parametrize("rule", RULES)
def test_every_sample_has_its_advantage_in_the_order_of_the_groups(rule):
    """The mean over its tokens; NaN where there was nothing to train. A critic that has learnt nothing orders nothing."""
    engine = tiny_engine(trainer_spec(rule=rule, algorithm=RULES[rule]))
    _step(engine)
    told = unpack_float32(engine.advantages([4, 2]))
    assert len(told) == 2 + 3
    assert [math.isnan(value) for value in told] == [False, False, False, True, False]
    assert rule in ("ppo", "archer", "supervised") or (told[1] > told[0] and told[2] > told[4])
    assert engine.advantages([2, 4]) == pack_float32([*told[2:], *told[:2]])
    if rule in ("grpo", "gspo"):
        assert told.tolist() == pytest.approx([-1, 1, 1, math.nan, -1], abs=1e-4, nan_ok=True)


@pytest.mark.parametrize("rule", RULES)
def test_a_step_without_samples_is_a_step(rule):
    metrics = _step(tiny_engine(trainer_spec(rule=rule, algorithm=RULES[rule])), groups=[make_group(2, rewards=[None])])
    assert (metrics["loss"], metrics["gradient_norm"], metrics["forward_tokens"]) == (0.0, 0.0, 0.0)
    assert metrics["skipped_nonfinite_steps"] == 0


@pytest.mark.parametrize("rule", RULES)
def test_a_dummy_leaves_gradients_and_sums_as_they_are(rule):
    spec = trainer_spec(rule=rule, algorithm=RULES[rule])
    worker = tiny_worker(spec)
    before = worker.measured(None)
    assert worker.prepare([]) is not None
    worker.accumulate([])
    assert worker.measured(None) == before
    gradients = worker.gradients()
    assert gradients
    assert all(not gradient.any() for gradient in gradients.values())


def test_the_critic_learns_alone_at_first():
    spec = trainer_spec(rule="ppo", algorithm={"critic": {"warmUpSteps": 1, "learningRate": 1e-2}, "epochs": 3})
    engine = tiny_engine(spec)
    before = tensors_hash(engine.tensors())
    first = _step(engine, step=0)
    assert tensors_hash(engine.tensors()) == before
    assert (first["gradient_norm"], first["learning_rate"]) == (0.0, 0.0)
    later = _step(engine, step=1)
    assert tensors_hash(engine.tensors()) != before
    assert later["value_loss"] < first["value_loss"]
    assert later["explained_variance"] > first["explained_variance"]


def test_later_updates_are_corrected_against_the_batchs_start():
    """Behaviour equal to the policy: the first update's weights are 1, and stay 1 as the policy moves away."""
    spec = trainer_spec(
        rule="reinforcePP", algorithm={"epochs": 3}, correction={"truncatedImportance": {}}, learningRate=3e-3
    )
    worker = tiny_worker(spec)
    groups = _groups()
    for trajectory in (t for group in groups for t in group.samples):
        (prepared,) = worker.prepare(pack_sample(trajectory, step=0, attempt=1))
        trajectory.logprobs = array("f", prepared["proximal_N"]).tobytes()
    metrics = _step(engine_on(worker, spec=spec), groups=groups)
    assert metrics["correction_weight_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ratio_max"] > 1.01


def test_the_logprob_difference_of_fresh_tokens_does_not_grow_with_the_updates():
    """It says how far the generator's arithmetic is from the trainer's; how far updates have moved the policy is another number."""
    drawn = _groups()
    many = trainer_spec(rule="reinforcePP", algorithm={"epochs": 3, "miniBatches": 2}, learningRate=0.02)
    once = _step(tiny_engine(trainer_spec(rule="reinforcePP")), groups=drawn)
    often = _step(tiny_engine(many), groups=drawn)
    assert often["ratio_mean"] != pytest.approx(once["ratio_mean"], rel=0.01)
    assert often["train_infer_logprob_diff_mean"] == pytest.approx(once["train_infer_logprob_diff_mean"], rel=1e-4)


def test_decoupled_ppo_leaves_out_tokens_above_the_cap():
    groups = [make_group(1)]
    kept = _step(tiny_engine(trainer_spec(correction={"decoupledPpo": {"cap": 1000.0}})), groups=groups)
    masked = _step(tiny_engine(trainer_spec(correction={"decoupledPpo": {"cap": 1.0}})), groups=groups)
    assert kept["masked_fraction"] == 0.0 < masked["masked_fraction"] < 1.0
    assert masked["correction_weight_mean"] < 1.0


def test_m2po_masks_over_the_step_and_leaves_fresh_samples_alone():
    """Log-probs of any other policy are masked until the rest is near; those of the policy itself are not."""
    worker = tiny_worker(spec := trainer_spec(correction={"m2po": {}}, microBatchTokens=40))
    far = _step(tiny_engine(spec))
    assert 0.0 < far["masked_fraction"] < 1.0
    groups = _groups()
    for sample in (s for group in groups for s in group.samples):
        (prepared,) = worker.prepare(pack_sample(sample, step=0, attempt=1))
        sample.logprobs = array("f", prepared["proximal_N"]).tobytes()
    near = _step(engine_on(worker, spec=spec), groups=groups)
    assert (near["masked_fraction"], near["clip_fraction"]) == (0.0, 0.0)
    assert near["correction_weight_mean"] == pytest.approx(1.0, abs=1e-5)


def test_a_coefficient_of_zero_only_measures():
    plain = _step(tiny_engine(trainer_spec()))
    measured = _step(tiny_engine(trainer_spec(algorithm={"referenceKl": {"coefficient": 0.0}})))
    assert measured["loss"] == plain["loss"]
    assert measured["gradient_norm"] == plain["gradient_norm"]
    assert measured["reference_kl"] > 0 == plain["reference_kl"]


def test_equal_rewards_still_feel_the_pull_to_the_reference():
    spec = trainer_spec(algorithm={"referenceKl": {"coefficient": 0.1}})
    metrics = _step(tiny_engine(spec), groups=[make_group(3, rewards=[1.0, 1.0])])
    assert metrics["gradient_norm"] > 0
    assert metrics["skipped_tokens"] == 0


@given(samples=st.integers(1, 12), mini_batches=st.integers(1, 5), budget=st.integers(16, 200))
@settings(max_examples=8, deadline=None)
def test_mini_batches_hold_every_sample_once_an_epoch(samples, mini_batches, budget):
    constants = {"epochs": 2, "miniBatches": mini_batches}
    spec = trainer_spec(rule="reinforcePP", algorithm=constants, microBatchTokens=budget)
    ranks = Recording(SingleRank(tiny_worker(spec)))
    group = make_group(7, rewards=[float(n) for n in range(samples)])
    metrics = _step(TorchEngine(ranks, spec=spec, algorithm=create_algorithm(spec)), groups=[group])
    trained = [sample.index for method, payload in ranks.calls if method == "accumulate" for sample in payload]
    assert sorted(trained[:samples]) == sorted(trained[samples:]) == list(range(samples))
    assert metrics["updates"] == 2 * min(mini_batches, samples) == [m for m, _ in ranks.calls].count("update")


@given(mini_batches=st.integers(1, 4), budget=st.integers(16, 200))
@settings(max_examples=6, deadline=None)
def test_the_contexts_of_a_sample_are_in_one_mini_batch(mini_batches, budget):
    constants = {"epochs": 1, "miniBatches": mini_batches, "critic": {"warmUpSteps": 0}}
    spec = trainer_spec(rule="ppo", algorithm=constants, microBatchTokens=budget)
    ranks = Recording(SingleRank(tiny_worker(spec)))
    _step(TorchEngine(ranks, spec=spec, algorithm=create_algorithm(spec)), groups=[branched(7, [1.0] * 6)])
    updates = [[]]
    for method, payload in ranks.calls:
        updates += [[]] if method == "zero" else []
        updates[-1] += [(one.index, one.context) for one in payload] if method == "accumulate" else []
    assert sorted(key for update in updates for key in update) == [(n, k) for n in range(6) for k in range(1 + n % 3)]
    assert len(updates) == mini_batches
    assert sum(len({index for index, _ in update}) for update in updates) == 6


class Recording:
    """One rank whose calls are kept."""

    size = 1

    def __init__(self, inner):
        self._inner, self.calls = inner, []

    def call(self, method, payloads):
        self.calls.append((method, payloads[0]))
        return self._inner.call(method, payloads)


@pytest.mark.parametrize(
    ("rule", "correction"),
    [("grpo", None), ("grpo", {"m2po": {"threshold": 2.0}}), ("ppo", None), ("trajectoryBalance", None)],
)
def test_two_ranks_share_the_work_of_one(rule, correction):
    """Two ranks that do not talk to each other: their gradients add up, their sums are merged."""
    spec = trainer_spec(
        rule=rule,
        algorithm={"beta": 0.5} if rule == "trajectoryBalance" else {"referenceKl": {}},
        correction=correction,
        microBatchTokens=40,
        gradientClipNorm=1e6,
        learningRate=1e-9,
    )
    alone, pair = tiny_worker(spec), SideBySide(tiny_worker(spec), tiny_worker(spec))
    whole = _step(engine_on(alone, spec=spec))
    shared = _step(TorchEngine(pair, spec=spec, algorithm=create_algorithm(spec)))
    own = {"gradient_norm", "critic_gradient_norm"}  # of one rank
    assert {k: v for k, v in shared.items() if k not in own} == pytest.approx(
        {k: v for k, v in whole.items() if k not in own}, rel=1e-4, abs=1e-5
    )
    halves = [worker.gradients() for worker in pair.workers]
    for name, gradient in alone.gradients().items():
        both = halves[0][name] + halves[1][name]
        assert (both - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name
    assert all(any(gradient.any() for gradient in half.values()) for half in halves)


class SideBySide:
    """Every rank in this process, without collectives."""

    size = 2

    def __init__(self, *workers):
        self.workers = workers

    def call(self, method, payloads):
        return [getattr(worker, method)(payload) for worker, payload in zip(self.workers, payloads, strict=True)]


numbers = st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=15)


@given(numbers=numbers, discount=st.floats(0.1, 1), gae_lambda=st.floats(0, 1))
def test_generalised_advantages_equal_the_sum_over_deltas(numbers, discount, gae_lambda):
    rewards, values = ([pair[i] for pair in numbers] for i in range(2))
    following = [*values[1:], 0.0]
    deltas = [r + discount * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    expected = [
        sum((discount * gae_lambda) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))
    ]
    got = generalised(rewards, values=values, discount=discount, gae_lambda=gae_lambda)
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(turns=st.lists(st.tuples(st.integers(1, 5), st.none() | st.floats(-2, 2)), min_size=1, max_size=5), total=reals)
def test_the_rewards_of_tokens_add_up_to_the_samples(turns, total):
    track = TokenView(reward=total, turns=tuple(ModelTurn(tokens=n, reward=r) for n, r in turns))
    rewards = token_rewards(track, kl=None)
    assert sum(rewards) == pytest.approx(total, abs=1e-9)
    ends = {sum(n for n, _ in turns[: i + 1]) - 1 for i in range(len(turns))}
    assert all(reward == 0 for place, reward in enumerate(rewards) if place not in ends)


def test_equal_numbers_are_normalised_to_zeros():
    assert normalised([[0.5, 0.5], [], [0.5]]) == [[0.0, 0.0], [], [0.0]]
    assert normalised([[]]) == [[]]


@pytest.mark.parametrize(
    ("kind", "warm_up", "steps", "expected"),
    [
        ("Constant", 0, 3, [1.0, 1.0, 1.0]),
        ("Constant", 2, 4, [0.5, 1.0, 1.0, 1.0]),
        ("Linear", 0, 4, [1.0, 0.75, 0.5, 0.25]),
        ("Linear", 2, 6, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("Cosine", 0, 4, [1.0, 0.8535534, 0.5, 0.1464466]),
        ("Cosine", 1, 3, [1.0, 1.0, 0.5]),
        ("Linear", 8, 4, [0.125, 0.25, 0.375, 0.5]),
        ("Cosine", 0, 1, [1.0]),
    ],
)
def test_rates(kind, warm_up, steps, expected):
    trainer = trainer_spec(schedule=kind, learningRate=2e-3, warmUpSteps=warm_up).trainer
    assert [learning_rate(step, spec=trainer, steps=steps) for step in range(steps)] == pytest.approx(
        [2e-3 * share for share in expected]
    )


def test_a_step_beyond_the_end_has_no_negative_rate():
    for kind in ("Linear", "Cosine"):
        trainer = trainer_spec(schedule=kind, learningRate=1e-3, warmUpSteps=0).trainer
        assert learning_rate(9, spec=trainer, steps=4) == pytest.approx(0.0)
