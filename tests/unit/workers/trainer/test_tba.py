"""Trajectory balance on a task that can be enumerated: one token of a small vocabulary, drawn by the policy of S steps ago."""

from collections import deque

import pytest
import torch

from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.algorithms.algorithm import (
    Algorithm,
    BatchAlgorithm,
    ModelTurn,
    RewardedSample,
    TokenBatch,
    TokenView,
)
from support.trainer_groups import trainer_spec

TOKENS, GROUPS, GROUP_SIZE = 12, 8, 16
STALENESS, STEPS, SETTLED_STEPS = 32, 500, 200
BETA = 0.1
ONE_TOKEN = (ModelTurn(tokens=1),)


def advantages_of(algorithm: Algorithm, drawn: list[int], rewards: torch.Tensor, start: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """As an engine asks for them; groups lie one behind the other."""
    earned = [float(rewards[token]) for token in drawn]
    if isinstance(algorithm, BatchAlgorithm):
        views = [
            TokenView(
                reward=reward,
                turns=ONE_TOKEN,
                group_id=number // GROUP_SIZE,
                proximal_N=[float(start[token])],
                reference_N=[float(initial[token])],
            )
            for number, (token, reward) in enumerate(zip(drawn, earned, strict=True))
        ]
        return torch.tensor([found.advantages_N[0] for found in algorithm.values(views)])
    samples = [RewardedSample(reward=reward, turns=ONE_TOKEN) for reward in earned]
    groups = [samples[begin : begin + GROUP_SIZE] for begin in range(0, len(samples), GROUP_SIZE)]
    return torch.tensor([advantage for group in groups for advantage in algorithm.advantages(group)])


def largest_distance(algorithm: Algorithm, *, staleness: int) -> float:
    """Largest total variation from initial x exp(reward / beta), once the run had time to settle."""
    generator = torch.Generator().manual_seed(0)
    initial = torch.log_softmax(torch.randn(TOKENS, generator=generator), -1)
    rewards = torch.rand(TOKENS, generator=generator)
    target = torch.softmax(initial + rewards / BETA, -1)
    logits = initial.clone().requires_grad_()
    optimiser = torch.optim.Adam([logits], lr=0.03)
    policies = deque([initial], maxlen=staleness + 1)
    distances = []
    for _ in range(STEPS):
        behaviour = policies[0]  # while the run is young, the initial one
        start = torch.log_softmax(logits, -1).detach()
        drawn = torch.multinomial(behaviour.exp(), GROUPS * GROUP_SIZE, replacement=True, generator=generator)
        batch = TokenBatch(
            logprobs_N=torch.log_softmax(logits, -1)[drawn],
            behaviour_N=behaviour[drawn],
            proximal_N=start[drawn],
            advantages_N=advantages_of(algorithm, drawn.tolist(), rewards, start, initial),
            sequences_N=torch.arange(len(drawn)),
            reference_N=initial[drawn],
        )
        optimiser.zero_grad()
        algorithm.token_loss(batch).loss_N.mean().backward()
        optimiser.step()
        policies.append(torch.log_softmax(logits, -1).detach())
        distances.append(float((policies[-1].exp() - target).abs().sum()) / 2)
    assert distances[0] > 0.5
    return max(distances[SETTLED_STEPS:])


@pytest.mark.parametrize("staleness", [0, STALENESS])
def test_the_policy_becomes_the_initial_one_times_the_exponential_of_the_reward(staleness):
    algorithm = create_algorithm(trainer_spec(rule="trajectoryBalance", algorithm={"beta": BETA}))
    assert largest_distance(algorithm, staleness=staleness) < 0.05


@pytest.mark.parametrize(("staleness", "settles"), [(0, True), (STALENESS, False)])
def test_grpo_with_truncated_importance_reaches_it_with_fresh_samples_alone(staleness, settles):
    """K2's gradient is that of the divergence, so both have one target."""
    constants = {"normalizeStd": False, "referenceKl": {"coefficient": BETA, "estimator": "K2"}}
    spec = trainer_spec(algorithm=constants, correction={"truncatedImportance": {}})
    assert (largest_distance(create_algorithm(spec), staleness=staleness) < 0.05) == settles
