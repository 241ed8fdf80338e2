"""The algorithms that we ship as plug-ins, against plain loops written from their papers."""

import math
from collections.abc import Sequence

import pytest
import torch

from streamrl.testing import check_advantages, check_loss
from streamrl_workers.trainer.algorithms.cispo import Cispo
from streamrl_workers.trainer.algorithms.dppo import Dppo
from streamrl_workers.trainer.algorithms.max_rl import MaxRl
from streamrl_workers.trainer.algorithms.sapo import Sapo
from streamrl_workers.weights.hashing import tensors_hash
from support.tiny_trainer import tiny_engine
from support.trainer_groups import make_group, trainer_spec

CORRECTIONS = [{"twoSidedClip": {}}, {"truncatedImportance": {"cap": 1.2}}, {"decoupledPpo": {"cap": 1.3}}]
K2 = {"coefficient": 0.3, "estimator": "K2"}


def divergence(token) -> torch.Tensor:
    return K2["coefficient"] * (token.logprob - token.reference) ** 2 / 2


def cispo(token, *, low: float, high: float):
    weight = min(max(math.exp(token.logprob.item() - token.anchor), low), high)
    return -token.weight * weight * token.advantage * token.logprob


def sapo(token, *, positive: float, negative: float):
    tau = positive if token.advantage > 0 else negative
    gate = 4 / tau / (1 + torch.exp(-tau * (torch.exp(token.logprob - token.anchor) - 1)))
    return -token.weight * gate * token.advantage


def dppo(token, *, divergence: str, threshold: float):
    p, q = math.exp(token.logprob.item()), math.exp(token.anchor)
    far = abs(p - q)
    if divergence == "KullbackLeibler":
        far = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    ratio = torch.exp(token.logprob - token.anchor)
    away = ratio.item() > 1 if token.advantage > 0 else ratio.item() < 1
    return ratio * (0.0 if far > threshold and away else -token.weight * token.advantage)


def clipped(token):
    """PPO's, with low and high .2 and no cap within reach."""
    ratio, a = torch.exp(token.logprob - token.anchor), token.advantage
    return -token.weight * torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)


CASES = {
    "cispo": (Cispo, {}, lambda token: cispo(token, low=0.0, high=1.28)),
    "cispo bounded": (Cispo, {"clipLow": 0.2, "clipHigh": 0.1}, lambda token: cispo(token, low=0.8, high=1.1)),
    "cispo pulled": (Cispo, {"referenceKl": K2}, lambda token: cispo(token, low=0.0, high=1.28) + divergence(token)),
    "sapo": (Sapo, {}, lambda token: sapo(token, positive=1.0, negative=1.05)),
    "sapo narrow": (
        Sapo,
        {"tauPositive": 3.0, "tauNegative": 9.0},
        lambda token: sapo(token, positive=3.0, negative=9.0),
    ),
    "dppo": (
        Dppo,
        {"threshold": 0.02},
        lambda token: dppo(token, divergence="TotalVariation", threshold=0.02),
    ),
    "dppo KL": (
        Dppo,
        {"divergence": "KullbackLeibler", "threshold": 0.01},
        lambda token: dppo(token, divergence="KullbackLeibler", threshold=0.01),
    ),
    "maxRl": (MaxRl, {}, clipped),
}


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda correction: next(iter(correction)))
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_equal_the_loop(case, correction):
    kind, options, loss = CASES[case]
    check_loss(kind, lambda tokens: [loss(token) for token in tokens], options=options, correction=correction)


def standardised(rewards: Sequence[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / (deviation + 1e-6) for reward in rewards]


def by_the_mean(rewards: Sequence[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    return [(reward - mean) / mean if mean > 0 else 0.0 for reward in rewards]


@pytest.mark.parametrize(
    ("kind", "loop"), [(Cispo, standardised), (Sapo, standardised), (Dppo, standardised), (MaxRl, by_the_mean)]
)
def test_advantages_equal_the_loop(kind, loop):
    check_advantages(kind, loop)


@pytest.mark.parametrize("name", ["cispo", "dppo", "maxRl", "sapo"])
def test_a_job_names_it_by_its_entry_point(name):
    torch.set_num_threads(1)
    engine = tiny_engine(trainer_spec(rule="python", algorithm={"class": name}))
    before = tensors_hash(engine.tensors())
    engine.begin_step(0, attempt=1)
    engine.add([make_group(1), make_group(2, rewards=[1.0, None, 0.0])])
    assert math.isfinite(engine.finish_step()["loss"])
    assert tensors_hash(engine.tensors()) != before
