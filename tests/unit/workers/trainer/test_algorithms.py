"""Each rule's loss and gradient on a real model against plain loops over tokens, written from the papers alone.

The loops run one sequence at a time, without padding, on a float64 copy of the model; they share no code with the rules.
"""

import math
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.packing import pack_float32, pack_int32, unpack_float32, unpack_int32
from streamrl_workers.trainer.engines.packing import pack, pack_sample
from support.tiny_trainer import REFERENCE_SEED, VOCABULARY, engine_on, tiny_critic, tiny_model, tiny_worker
from support.trainer_groups import make_group, trainer_spec

MAX_TOKENS = 64
TEMPERATURE = 0.8


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def multi_turn(group_id: int, rewards: list[float | None]) -> pb.Group:
    """ModelTurn, observation, turn, (for odd samples) observation at the end; tokens of two versions."""
    rng = random.Random(f"turns/{group_id}")
    trajectories = []
    for index, reward in enumerate(rewards):
        sizes = [(rng.randint(1, 6), False), (rng.randint(1, 4), True), (rng.randint(1, 6), False)]
        sizes += [(2, True)] if index % 2 else []
        total = sum(tokens for tokens, _ in sizes)
        logprobs = [0.0 if observation else rng.uniform(-5, -1) for tokens, observation in sizes for _ in range(tokens)]
        turns = [
            pb.Segment(tokens=tokens, observation=observation, reward=None if observation else rng.uniform(-0.5, 0.5))
            for tokens, observation in sizes
        ]
        trajectories.append(
            pb.Sample(
                group_id=group_id,
                sample_index=index,
                prompt_tokens=pack_int32([1, 2, 3]),
                tokens=pack_int32([rng.randrange(VOCABULARY) for _ in range(total)]),
                logprobs=pack_float32(logprobs),
                spans=[
                    pb.VersionSpan(tokens=1, step=0, attempt=1),
                    pb.VersionSpan(tokens=total - 1, step=1, attempt=1),
                ],
                segments=turns,
                finish_reason="stop",
                reward=reward,
            )
        )
    return pb.Group(group_id=group_id, step=1, samples=trajectories)


def groups() -> list[pb.Group]:
    """Stale and fresh, with and without rewards, with turns, with nothing to learn."""
    return [
        make_group(1, step=0),
        make_group(2, step=1, rewards=[1.0, None, 0.0]),
        make_group(3, step=1, rewards=[1.0, 1.0, 1.0]),
        multi_turn(4, [0.3, 1.2, None, 0.0]),
        make_group(5, step=0, rewards=[0.2, 0.9]),
        make_group(6, rewards=[None, None]),
    ]


# ---------------------------------------------------------------- the independent side


@dataclass(kw_only=True)
class Seen:
    """A sample as the loops see it; all lists are of the tokens that the model drew."""

    group: int
    reward: float
    policy: list[torch.Tensor]  # float64 scalars with gradient
    behaviour: list[float]
    reference: list[float]
    values: list[torch.Tensor]
    ends: dict[int, float]  # token at which a turn ends -> the turn's reward
    longest: int = 0


def look(trajectory: pb.Sample, models: dict[str, torch.nn.Module]) -> Seen:
    prompt, tokens = list(unpack_int32(trajectory.prompt_tokens)), list(unpack_int32(trajectory.tokens))
    inputs = torch.tensor([prompt + tokens])
    policy = torch.log_softmax(models["policy"](input_ids=inputs).logits[0] / TEMPERATURE, -1)
    with torch.no_grad():
        reference = torch.log_softmax(models["reference"](input_ids=inputs).logits[0] / TEMPERATURE, -1)
    critic = models["critic"]
    values = critic.head(critic.body(input_ids=inputs).last_hidden_state)[0, :, 0]
    behaviour = unpack_float32(trajectory.logprobs)
    seen = Seen(
        group=trajectory.group_id,
        reward=trajectory.reward,
        policy=[],
        behaviour=[],
        reference=[],
        values=[],
        ends={},
    )
    place = 0
    for segment in trajectory.segments or [pb.Segment(tokens=len(tokens))]:
        for _ in range(segment.tokens):
            if not segment.observation:
                row = len(prompt) + place - 1
                seen.policy.append(policy[row, tokens[place]])
                seen.reference.append(float(reference[row, tokens[place]]))
                seen.behaviour.append(behaviour[place])
                seen.values.append(values[row])
            place += 1
        if not segment.observation:
            seen.longest = max(seen.longest, segment.tokens)
            seen.ends[len(seen.policy) - 1] = segment.reward
    return seen


def bounded(ratio: torch.Tensor, advantage: float, low: float, high: float, cap: float) -> torch.Tensor:
    """PPO's clip, the dual clip beside it, case by case."""
    if advantage >= 0:
        return (ratio if ratio.item() < high else torch.tensor(high).double()) * advantage
    if ratio.item() < low:
        return torch.tensor(low).double() * advantage
    return (ratio if ratio.item() < max(cap, high) else torch.tensor(max(cap, high)).double()) * advantage


def surrogate(policy, behaviour, proximal, advantage, case: "Case", whole: float, kept: bool = True) -> torch.Tensor:
    """Of one ratio under each of the corrections; `whole`: proximal / behaviour of the whole sequence; `kept`: by m2po."""
    low, high, cap = 1 - case.low, 1 + case.high, case.cap
    if case.correction == "twoSidedClip":
        return -bounded(torch.exp(policy - behaviour), advantage, low, high, cap)
    weight = whole if case.level == "Sequence" else math.exp(proximal - behaviour)
    if case.correction == "truncatedImportance":
        weight = min(weight, cap)
    elif case.correction == "m2po":
        weight = weight if kept else 0.0
    elif weight > cap or (case.correction == "maskedImportance" and weight < case.least):
        weight = 0.0
    return -weight * bounded(torch.exp(policy - proximal), advantage, low, high, math.inf)


def far_tokens(seen: list[Seen], case: "Case") -> set[tuple[int, int]]:
    """Samples and tokens that M2PO masks: the farthest first, until the mean square of the rest is at most the threshold."""
    if case.correction != "m2po":
        return set()
    left = {(i, t): (p.item() - s.behaviour[t]) ** 2 for i, s in enumerate(seen) for t, p in enumerate(s.policy)}
    gone = set()
    while left and sum(left.values()) / len(left) > case.cap:
        farthest = max(left, key=left.__getitem__)
        gone.add(farthest)
        del left[farthest]
    assert gone
    assert left
    return gone


def ratio_of(policy: list[torch.Tensor], behaviour: list[float]) -> float:
    """Of a whole sequence, token by token."""
    ratio = 1.0
    for p, b in zip(policy, behaviour, strict=True):
        ratio *= math.exp(p.item() - b)
    return ratio


def estimate(kind: str, policy: torch.Tensor, reference: float) -> torch.Tensor:
    d = policy - reference
    return {"K1": lambda: d, "K2": lambda: d * d / 2, "K3": lambda: torch.exp(-d) - 1 + d}[kind]()


def group_advantages(seen: list[Seen], kind: Callable[[list[float]], list[float]], rewards=None) -> list[float]:
    rewards = rewards or [s.reward for s in seen]
    found = [0.0] * len(seen)
    for group in {s.group for s in seen}:
        members = [i for i, s in enumerate(seen) if s.group == group]
        for member, advantage in zip(members, kind([rewards[i] for i in members]), strict=True):
            found[member] = advantage
    return found


def standardised(rewards: list[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / (deviation + 1e-6) for r in rewards]


def centred(rewards: list[float]) -> list[float]:
    return [r - sum(rewards) / len(rewards) for r in rewards]


def left_out(rewards: list[float]) -> list[float]:
    return [r - sum(rewards[:i] + rewards[i + 1 :]) / (len(rewards) - 1) for i, r in enumerate(rewards)]


def shaped(seen: list[Seen], buffer: int, penalty: float) -> list[float]:
    """Equation 13 of DAPO, case by case."""
    rewards = []
    for s in seen:
        if s.longest <= MAX_TOKENS - buffer:
            rewards.append(s.reward)
        elif s.longest <= MAX_TOKENS:
            rewards.append(s.reward + penalty * ((MAX_TOKENS - buffer) - s.longest) / buffer)
        else:
            rewards.append(s.reward - penalty)
    return rewards


@dataclass(frozen=True, kw_only=True)
class Case:
    """A rule with its constants, and what the paper says of it."""

    rule: str
    algorithm: dict[str, Any]
    correction: str = "twoSidedClip"
    level: str | None = None
    least: float = 0.0
    cap: float = 5.0
    low: float = 0.2
    high: float = 0.2

    @property
    def constants(self) -> dict[str, Any]:
        """Of the correction, in the words of the job file."""
        if self.correction == "m2po":
            return {"threshold": self.cap}
        level = {} if self.level is None else {"level": self.level}
        if self.correction == "maskedImportance":
            return {**level, "low": self.least, "high": self.cap}
        return {**level, "cap": self.cap}

    @property
    def kl(self) -> dict[str, Any] | None:
        return self.algorithm.get("referenceKl")


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
MASKED = [
    Case(rule="grpo", algorithm={}, correction="m2po", cap=3.0),
    Case(rule="drGrpo", algorithm={"referenceKl": KL}, correction="m2po", cap=1.0),
]
GROUP_CASES += MASKED


def expected_group_loss(case: Case, seen: list[Seen], samples: int) -> torch.Tensor:
    if case.rule == "dapo" and "overlong" in case.algorithm:
        overlong = case.algorithm["overlong"]
        rewards = shaped(seen, overlong["bufferTokens"], overlong["penalty"])
        advantages = group_advantages(seen, standardised, rewards)
    elif case.rule == "rloo":
        advantages = group_advantages(seen, left_out)
    elif case.rule == "drGrpo" or case.algorithm.get("normalizeStd") is False:
        advantages = group_advantages(seen, centred)
    else:
        advantages = group_advantages(seen, standardised)
    sums: list[torch.Tensor] = []
    learning = [i for i, advantage in enumerate(advantages) if advantage != 0 or case.kl]  # others have no pass
    gone = {(learning[i], t) for i, t in far_tokens([seen[i] for i in learning], case)}
    for i, (s, advantage) in enumerate(zip(seen, advantages, strict=True)):
        total = torch.zeros((), dtype=torch.float64)
        whole = ratio_of(s.policy, s.behaviour)
        if case.rule == "gspo":
            n = len(s.policy)
            policy, behaviour = sum(s.policy) / n, sum(s.behaviour) / n
            total = total + n * surrogate(policy, behaviour, policy.item(), advantage, case, whole)
        for token, policy in enumerate(s.policy):
            if case.rule != "gspo":
                kept = (i, token) not in gone
                total = total + surrogate(policy, s.behaviour[token], policy.item(), advantage, case, whole, kept)
            if case.kl:
                total = total + case.kl["coefficient"] * estimate(case.kl["estimator"], policy, s.reference[token])
        sums.append(total)
    if case.rule == "drGrpo":
        return sum(sums) / (samples * MAX_TOKENS)
    if case.rule == "dapo" or case.algorithm.get("aggregation") == "TokenMean":
        return sum(sums) / sum(len(s.policy) for s in seen)
    if case.rule == "rloo":
        return sum(sums) / len(seen)
    return sum(total / len(s.policy) for total, s in zip(sums, seen, strict=True)) / len(seen)


def expected_batch_losses(case: Case, seen: list[Seen]) -> tuple[torch.Tensor, torch.Tensor]:
    """Policy and value loss of a single update over the whole batch."""
    discount, lam = case.algorithm.get("discount", 1.0), case.algorithm.get("gaeLambda", 1.0)
    raw: list[float] = []
    targets: list[float] = []
    for s in seen:
        rewards = [s.ends.get(token, 0.0) for token in range(len(s.policy))]
        rewards[-1] += s.reward - sum(s.ends.values())
        if case.kl:
            pulls = [estimate(case.kl["estimator"], p, r) for p, r in zip(s.policy, s.reference, strict=True)]
            rewards = [r - case.kl["coefficient"] * pull.item() for r, pull in zip(rewards, pulls, strict=True)]
        n, values = len(rewards), [*(v.item() for v in s.values), 0.0]
        for t in range(n):
            if case.rule == "reinforcePP":
                raw.append(sum(discount ** (k - t) * rewards[k] for k in range(t, n)))
                continue
            deltas = [rewards[k] + discount * values[k + 1] - values[k] for k in range(n)]
            raw.append(sum((discount * lam) ** (k - t) * deltas[k] for k in range(t, n)))
            targets.append(raw[-1] + values[t])
    mean = sum(raw) / len(raw)
    deviation = math.sqrt(sum((a - mean) ** 2 for a in raw) / len(raw))
    advantages = [(a - mean) / (deviation + 1e-8) for a in raw]
    tokens = [(p, b, ratio_of(s.policy, s.behaviour)) for s in seen for p, b in zip(s.policy, s.behaviour, strict=True)]
    gone = far_tokens(seen, case)
    kept = [(i, t) not in gone for i, s in enumerate(seen) for t in range(len(s.policy))]
    losses = [
        surrogate(p, b, p.item(), a, case, whole, is_kept)
        for (p, b, whole), a, is_kept in zip(tokens, advantages, kept, strict=True)
    ]
    values = [v for s in seen for v in s.values]
    errors = [(v - g) ** 2 / 2 for v, g in zip(values, targets, strict=False)]
    return sum(losses) / len(losses), sum(errors, start=torch.zeros(())) / len(losses)


# ---------------------------------------------------------------- both sides together


def looks(models: dict[str, torch.nn.Module]) -> list[Seen]:
    return [look(t, models) for group in groups() for t in group.samples if t.HasField("reward")]


def float64_models() -> dict[str, torch.nn.Module]:
    models = {"policy": tiny_model(), "reference": tiny_model(REFERENCE_SEED), "critic": tiny_critic()}
    return {name: model.double().eval() for name, model in models.items()}


def spec_of(case: Case, **trainer: Any):
    return trainer_spec(
        rule=case.rule,
        algorithm=case.algorithm,
        correction={case.correction: case.constants},
        temperature=TEMPERATURE,
        gradientClipNorm=1e6,
        **trainer,
    )


def assert_gradients(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float = 1e-4) -> None:
    assert got.keys() == want.keys()
    scale = max(float(gradient.norm()) for gradient in want.values())
    for name, gradient in want.items():
        assert float((got[name].double() - gradient).norm()) <= tolerance * scale, name


def gradients_of(prefix: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        prefix + name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def _id(case: Case) -> str:
    return f"{case.rule}-{case.correction}{case.level or ''}-{'+'.join(case.algorithm) or 'plain'}"


@pytest.mark.parametrize("case", GROUP_CASES, ids=_id)
def test_a_group_rule_equals_the_loops(case):
    models = float64_models()
    loss = expected_group_loss(case, looks(models), samples=sum(len(g.samples) for g in groups()))
    loss.backward()
    worker = tiny_worker(spec_of(case))
    engine = engine_on(worker, spec=spec_of(case))
    engine.begin_step(1, attempt=1)
    engine.add(groups())
    metrics = engine.finish_step()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert_gradients(worker.gradients(), gradients_of("", models["policy"]))


BATCH_CASES = [
    Case(rule="reinforcePP", algorithm={}),
    Case(rule="reinforcePP", algorithm={"discount": 0.9, "referenceKl": {"coefficient": 0.2, "estimator": "K1"}}),
    Case(rule="reinforcePP", algorithm={"referenceKl": KL}, correction="truncatedImportance", cap=2.0),
    Case(rule="ppo", algorithm={}),
    Case(rule="ppo", algorithm={"gaeLambda": 0.9, "discount": 0.95, "referenceKl": KL}),
    Case(rule="ppo", algorithm={"gaeLambda": 0.0}, correction="decoupledPpo", cap=3.0),
    Case(rule="ppo", algorithm={}, correction="m2po", cap=2.0),
    *(Case(rule=rule, algorithm={}, **importance) for rule in ("reinforcePP", "ppo") for importance in IMPORTANCE),
]


@pytest.mark.parametrize("case", BATCH_CASES, ids=_id)
def test_a_batch_rule_equals_the_loops(case):
    models = float64_models()
    loss, errors = expected_batch_losses(case, looks(models))
    torch.autograd.backward([loss, errors] if case.rule == "ppo" else [loss])
    worker = tiny_worker(spec_of(case))
    engine = engine_on(worker, spec=spec_of(case))
    engine.begin_step(1, attempt=1)
    engine.add(groups())
    metrics = engine.finish_step()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
    want = gradients_of("", models["policy"])
    if case.rule == "ppo":
        assert metrics["value_loss"] == pytest.approx(errors.item(), rel=1e-4)
        want |= gradients_of("critic.", models["critic"])
    assert_gradients(worker.gradients(), want)


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
        seen, sample = look(trajectory, models), pack_sample(trajectory, step=1, attempt=1)
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
        samples.append(
            replace(
                sample,
                proximal_N=array("f", seen.reference),
                advantages_N=array("d", advantages),
                values_N=array("f", starts),
                returns_N=array("d", targets),
            )
        )
    torch.autograd.backward([total, errors] if case.rule == "ppo" else [total])
    worker = tiny_worker(spec_of(case))
    for batch in pack(samples, budget_tokens=100):
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
    engine.add(groups())
    metrics = engine.finish_step()
    engine = engine_on(streamed, spec=spec_of(case, microBatchTokens=40))
    engine.begin_step(1, attempt=1)
    rng = random.Random(seed)
    for group in rng.sample(groups(), len(groups())):
        engine.add([group])
        engine.advance(idle=rng.random() < 0.5)
    assert engine.finish_step() == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    assert_gradients(streamed.gradients(), {k: g.double() for k, g in whole.gradients().items()}, tolerance=1e-5)
