"""Each rule's loss and gradient on a real model against plain loops over tokens, written from the papers alone.

The loops (`support/paper_losses.py`) run one conversation at a time, without padding, on a float64 copy of the model.
"""

import math
import random
from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.trainer.engines.forward import UtteranceValueModel, ValueModel
from streamrl_workers.trainer.engines.packing import Update, pack, pack_sample
from streamrl_workers.trainer.engines.worker import RankWorker
from support.paper_losses import (
    REPLAYED,
    Case,
    Seen,
    expected_batch_losses,
    expected_group_loss,
    look,
    surrogate,
)
from support.tiny_trainer import REFERENCE_SEED, engine_on, tiny_critic, tiny_model, tiny_worker
from support.trainer_groups import branched, make_group, multi_turn, trainer_spec


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def groups() -> list[pb.Group]:
    """Stale and fresh, with and without rewards, with turns, with several contexts, with nothing to learn."""
    return [
        make_group(1, step=0),
        make_group(2, step=1, rewards=[1.0, None, 0.0]),
        make_group(3, step=1, rewards=[1.0, 1.0, 1.0]),
        multi_turn(4, [0.3, 1.2, None, 0.0]),
        branched(7, [0.1, None, 0.8, 0.4]),
        make_group(5, step=0, rewards=[0.2, 0.9]),
        make_group(6, rewards=[None, None]),
    ]


KL = {"coefficient": 0.3, "estimator": "K3"}
GROUP_CASES = [
    Case(rule="grpo", algorithm={}),
    Case(rule="grpo", algorithm={"aggregation": "TokenMean", "referenceKl": KL}),
    Case(rule="grpo", algorithm={"referenceKl": {**KL, "estimator": "K1"}}),
    Case(rule="grpo", algorithm={"referenceKl": {**KL, "estimator": "K2"}}),
    Case(rule="grpo", algorithm={"normalizeStd": False}, correction="truncatedImportance", cap=2.0),
    Case(rule="grpo", algorithm={}, correction="decoupledPpo", cap=3.0),
    Case(rule="drGrpo", algorithm={}),
    Case(rule="drGrpo", algorithm={"referenceKl": KL}, correction="decoupledPpo", cap=2.0),
    Case(rule="dapo", algorithm={"overlong": {"bufferTokens": 56, "penalty": 0.7}}, high=0.28),
    Case(rule="dapo", algorithm={}, high=0.28, correction="truncatedImportance", cap=1.5),
    Case(rule="rloo", algorithm={}),
    Case(rule="rloo", algorithm={"referenceKl": {**KL, "estimator": "K2"}}, correction="decoupledPpo"),
    Case(rule="gspo", algorithm={"clipLow": 0.3, "clipHigh": 0.4}, low=0.3, high=0.4),
    Case(rule="gspo", algorithm={}, low=3e-4, high=4e-4, correction="truncatedImportance", cap=1.2),
    Case(rule="gspo", algorithm={"clipLow": 0.3, "clipHigh": 0.4, "referenceKl": KL}, low=0.3, high=0.4, correction="decoupledPpo", cap=4.0),
]  # fmt: skip
IMPORTANCE: list[dict[str, Any]] = [
    {"correction": "truncatedImportance", "level": "Sequence", "cap": 5.0},
    {"correction": "maskedImportance", "level": "Token", "least": 0.4, "cap": 20.0},
    {"correction": "maskedImportance", "level": "Sequence", "least": 1e-6, "cap": 5.0},
]
"""Each bound is met by some and not by others: the groups' log-probs are random, so ratios of sequences are far from 1."""
GROUP_CASES += [
    Case(rule=rule, algorithm={}, high=high, **importance)
    for rule, high in {"grpo": 0.2, "drGrpo": 0.2, "dapo": 0.28, "rloo": 0.2}.items()
    for importance in IMPORTANCE
]
GROUP_CASES += [Case(rule="gspo", algorithm={}, low=3e-4, high=4e-4, **importance) for importance in IMPORTANCE]
TEACHER = {"teacher": {"path": {"directory": "teacher"}}}
GROUP_CASES += [
    Case(rule="distillation", algorithm=TEACHER),
    Case(rule="distillation", algorithm={**TEACHER, "rewardWeight": 0.7}, correction="truncatedImportance", cap=2.0),
]
MASKED = [
    Case(rule="distillation", algorithm=TEACHER, correction="m2po", cap=2.0),
    Case(rule="grpo", algorithm={}, correction="m2po", cap=3.0),
    Case(rule="drGrpo", algorithm={"referenceKl": KL}, correction="m2po", cap=1.0),
]
GROUP_CASES += MASKED


def groups_of(case: Case) -> list[pb.Group]:
    """With ArCHer some that teach the critic alone, and some turns drawn anew."""
    if case.rule != "archer":
        return groups()
    anew = make_group(8, step=1, rewards=[None, None, None])
    for sample in anew.samples:
        sample.resampled = True
    return [*groups(), anew, multi_turn(REPLAYED + 1, [0.4, None, 0.2]), branched(REPLAYED + 2, [0.5, 0.6, 0.7])]


def looks(models: dict[str, torch.nn.Module], case: Case) -> list[Seen]:
    return [
        look(t, models, temperature=case.temperature)
        for group in groups_of(case)
        for t in group.samples
        if t.HasField("reward") or t.resampled
    ]


OF_UTTERANCES = ("archer", "supervised")


def float64_models(rule: str = "ppo") -> dict[str, torch.nn.Module]:
    critic = tiny_critic(UtteranceValueModel if rule in OF_UTTERANCES else ValueModel)
    models = {"policy": tiny_model(), "reference": tiny_model(REFERENCE_SEED), "critic": critic}
    return {name: model.double().eval() for name, model in models.items()}


def spec_of(case: Case, **trainer: Any):
    return trainer_spec(
        rule=case.rule,
        algorithm=case.algorithm,
        correction={case.correction: case.constants},
        temperature=case.temperature,
        gradientClipNorm=1e6,
        **trainer,
    )


def assert_gradients(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float = 1e-4) -> None:
    assert got.keys() == want.keys()
    scale = max(float(gradient.norm()) for gradient in want.values())
    for name, gradient in want.items():
        assert float((got[name].double() - gradient).norm()) <= tolerance * scale, name


def watched(worker: RankWorker) -> dict[str, torch.Tensor]:
    """Gets the gradients of what is updated: ArCHer's critic is before its policy."""
    found: dict[str, torch.Tensor] = {}
    update = worker.update

    def watch(asked: Update) -> dict[str, float]:
        numbers = update(asked)
        found.update(
            (name, gradient)
            for name, gradient in worker.gradients().items()
            if (asked.critic if name.startswith("critic.") else asked.policy)
        )
        return numbers

    worker.update = watch
    return found


def gradients_of(prefix: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        prefix + name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def _id(case: Case) -> str:
    return f"{case.rule}-{case.correction}{case.level or ''}-{'+'.join(case.algorithm) or 'plain'}"


@pytest.mark.parametrize("case", GROUP_CASES, ids=_id)
def test_a_group_rule_equals_the_loops(case):
    models = float64_models()
    loss = expected_group_loss(case, looks(models, case), samples=sum(len(g.samples) for g in groups()))
    loss.backward()
    worker = tiny_worker(spec_of(case))
    engine = engine_on(worker, spec=spec_of(case))
    engine.begin_step(1, attempt=1)
    engine.add(groups())
    metrics = engine.finish_step()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert_gradients(worker.gradients(), gradients_of("", models["policy"]))


STILL = {"critic": {"learningRate": 1e-9}, "epochs": 1, "miniBatches": 1}
"""The policy's advantages are by a critic that has been updated."""


def logged(**constants: Any) -> Case:
    """IQL."""
    weights = {"critic": {"learningRate": 1e-9, "epochs": 1, "miniBatches": 1} | constants}
    return Case(rule="supervised", algorithm={"rewardField": "reward", "weights": weights})


BATCH_CASES = [
    Case(rule="reinforcePP", algorithm={}),
    Case(rule="reinforcePP", algorithm={"discount": 0.9, "referenceKl": {"coefficient": 0.2, "estimator": "K1"}}),
    Case(rule="reinforcePP", algorithm={"referenceKl": KL}, correction="truncatedImportance", cap=2.0),
    Case(rule="ppo", algorithm={}),
    Case(rule="ppo", algorithm={"gaeLambda": 0.9, "discount": 0.95, "referenceKl": KL}),
    Case(rule="ppo", algorithm={"gaeLambda": 0.0}, correction="decoupledPpo", cap=3.0),
    Case(rule="ppo", algorithm={}, correction="m2po", cap=2.0),
    Case(rule="trajectoryBalance", algorithm={"beta": 0.3}),
    Case(rule="trajectoryBalance", algorithm={"beta": 4.0}),
    *(Case(rule=rule, algorithm={}, **importance) for rule in ("reinforcePP", "ppo") for importance in IMPORTANCE),
    Case(rule="archer", algorithm=STILL),
    Case(rule="archer", algorithm={**STILL, "discount": 0.5, "referenceKl": KL}),
    *(Case(rule="archer", algorithm=STILL, **importance) for importance in IMPORTANCE),
    logged(),
    logged(expectile=0.95, discount=0.5, beta=2.0, most=1.5),
]
HAVE_CRITIC = ("ppo", *OF_UTTERANCES)


@pytest.mark.parametrize("case", BATCH_CASES, ids=_id)
def test_a_batch_rule_equals_the_loops(case):
    models = float64_models(case.rule)
    loss, errors = expected_batch_losses(case, looks(models, case))
    torch.autograd.backward([loss, errors] if case.rule in HAVE_CRITIC else [loss])
    worker = tiny_worker(spec_of(case))
    got = watched(worker)
    engine = engine_on(worker, spec=spec_of(case))
    engine.begin_step(1, attempt=1)
    engine.add(groups_of(case))
    metrics = engine.finish_step()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
    want = gradients_of("", models["policy"])
    if case.rule in HAVE_CRITIC:
        assert metrics["value_loss"] == pytest.approx(errors.item(), rel=1e-4)
        want |= gradients_of("critic.", models["critic"])
    assert_gradients(got, want)


LATER_CASES = [
    Case(rule="reinforcePP", algorithm={"epochs": 2}),
    Case(rule="ppo", algorithm={"epochs": 2, "critic": {"valueClip": 0.1}}, correction="truncatedImportance", cap=2.0),
    Case(rule="ppo", algorithm={"epochs": 2, "critic": {"valueClip": 0.3}}, correction="decoupledPpo", cap=3.0),
]


@pytest.mark.parametrize("case", LATER_CASES, ids=_id)
def test_an_update_behind_the_first_equals_the_loops(case):
    """The policy has left the batch's start, and so have the values; advantages and targets are any numbers."""
    models, rng = float64_models(), random.Random(3)
    samples, total, errors = [], torch.zeros(()), torch.zeros(())
    for trajectory in (t for group in groups() for t in group.samples if t.HasField("reward")):
        seen = look(trajectory, models)
        n = len(seen.policy)
        advantages, targets, moves = ([rng.uniform(-1, 1) for _ in range(n)] for _ in range(3))
        starts = [value.item() + move for value, move in zip(seen.values, moves, strict=True)]
        for t in range(n):  # the reference model stands for the batch's start
            total = total + surrogate(
                seen.policy[t], seen.behaviour[t], seen.reference[t], advantages[t], case, math.nan
            )  # no weight of a whole sequence among these cases
            if case.rule == "ppo":
                clip, value = case.algorithm["critic"]["valueClip"], seen.values[t]
                near = value if abs(value.item() - starts[t]) <= clip else starts[t] + math.copysign(clip, -moves[t])
                errors = errors + max((value - targets[t]) ** 2, (near - targets[t]) ** 2) / 2
        samples += [
            replace(
                context,
                proximal_N=array("f", seen.reference[begin:end]),
                advantages_N=array("d", advantages[begin:end]),
                values_N=array("f", starts[begin:end]),
                returns_N=array("d", targets[begin:end]),
            )
            for context, (begin, end) in zip(pack_sample(trajectory, step=1, attempt=1), seen.contexts, strict=True)
        ]
    torch.autograd.backward([total, errors] if case.rule == "ppo" else [total])
    worker = tiny_worker(spec_of(case))
    for (batch,) in pack(samples, budget_tokens=100, layout=worker.layout(None)):
        worker.accumulate(batch)
    want = gradients_of("", models["policy"])
    want |= gradients_of("critic.", models["critic"]) if case.rule == "ppo" else {}
    assert_gradients(worker.gradients(), want)


ORDER_CASES = [GROUP_CASES[1], GROUP_CASES[6], GROUP_CASES[9], GROUP_CASES[10], GROUP_CASES[14], *MASKED, *BATCH_CASES]
SEVERAL = Case(rule="ppo", algorithm={"epochs": 2, "miniBatches": 2})


@pytest.mark.parametrize("case", [*ORDER_CASES, SEVERAL], ids=_id)
@pytest.mark.parametrize("seed", [0, 1])
def test_any_order_and_cut_gives_the_same_gradient(case, seed):
    learning_rate = {"learningRate": 1e-6}  # several updates: Adam makes much of rounding
    whole = tiny_worker(spec_of(case, **learning_rate))
    streamed = tiny_worker(spec_of(case, microBatchTokens=40, **learning_rate))
    engine = engine_on(whole, spec=spec_of(case))
    engine.begin_step(1, attempt=1)
    engine.add(groups_of(case))
    metrics = engine.finish_step()
    engine = engine_on(streamed, spec=spec_of(case, microBatchTokens=40))
    engine.begin_step(1, attempt=1)
    rng, given = random.Random(seed), groups_of(case)
    for group in rng.sample(given, len(given)):
        engine.add([group])
        engine.advance(idle=rng.random() < 0.5)
    assert engine.finish_step() == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    assert_gradients(streamed.gradients(), {k: g.double() for k, g in whole.gradients().items()}, tolerance=1e-5)
