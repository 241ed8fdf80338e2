"""The test kit of algorithms, as `streamrl.testing`: an algorithm against a plain loop, on random tokens. Needs no model and no job.

Tokens are drawn so that every branch of a loss is met: policy, proximal policy and behaviour differ by up to a factor of e^0.9, advantages have
both signs, and a mask leaves some tokens out.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from streamrl.spec.algorithm import Correction
from streamrl.spec.base import PythonClass
from streamrl_workers.plugins.kinds import Plugin, kind_named
from streamrl_workers.plugins.load import checked
from streamrl_workers.trainer.algorithms.algorithm import (
    Algorithm,
    AlgorithmSetup,
    GroupAlgorithm,
    ModelTurn,
    RewardedSample,
    TokenBatch,
)
from streamrl_workers.trainer.algorithms.corrections import create_correction

_TOLERANCE = 1e-9
"""Relative; all numbers are float64."""
_SEEDS = range(5)
_KEPT_SHARE = 0.8
"""Of tokens, by the mask."""
_LENGTHS = (6, 1, 9, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A drawn token, as a plain loop sees it."""

    logprob: torch.Tensor  # of the policy in training: a scalar with a gradient
    behaviour: float  # log-prob when it was drawn
    proximal: float  # log-prob at the start of the step's updates
    reference: float  # log-prob of the initial model
    anchor: float  # log-prob that the job's correction divides by
    weight: float  # of the correction; 0 where it leaves the token out
    advantage: float


Loop = Callable[[Sequence[Token]], Sequence[torch.Tensor]]
"""Tokens of one sequence -> the loss of each."""
Options = Mapping[str, Any]


def make_algorithm(
    kind: type[Algorithm], *, options: Options | None = None, correction: Options | None = None, max_tokens: int = 64
) -> Algorithm:
    """Make an algorithm as a job does. `options`, `correction`: as in a job file. Raises `UserError` as a job's start."""
    named = PythonClass.model_validate({"class": kind.__name__, "options": dict(options or {})})
    loaded = checked(kind, plugin=Plugin(kind=kind_named("algorithm"), named=named))
    given = Correction.model_validate(dict(correction or {"twoSidedClip": {}}))
    made: Algorithm = loaded.made_by(
        AlgorithmSetup(spec=loaded.options, correction=create_correction(given), max_tokens=max_tokens)
    )
    return made


def check_loss(
    kind: type[Algorithm], loop: Loop, *, options: Options | None = None, correction: Options | None = None
) -> None:
    """Compare an algorithm's token losses and their gradients with those of a plain loop.

    Also: no gradient but through `logprobs_N`, none where the mask leaves a token out or a group is skipped, and the same losses however sequences are put together.
    A divergence from the initial model is no part of the comparison of masks: it is added unweighed.

    Raises `AssertionError`: what differs.
    """
    algorithm = make_algorithm(kind, options=options, correction=correction)
    for seed in _SEEDS:
        batch = _random_batch(seed)
        expected = [loss for tokens in _sequences(algorithm, batch) for loss in loop(tokens)]
        loss = algorithm.token_loss(batch)
        _assert_close(loss.loss_N, torch.stack(expected), what=f"losses (seed {seed})")
        (wanted,) = torch.autograd.grad(torch.stack(expected).sum(), batch.logprobs_N)
        (got,) = torch.autograd.grad(loss.loss_N.sum(), batch.logprobs_N)
        _assert_close(got, wanted, what=f"gradients (seed {seed})")
        if algorithm.reference_kl is None:
            assert not got[~_kept(batch)].any(), (
                "a token that the mask leaves out has a gradient: multiply by `corrected(batch).weight_N`"
            )
            _assert_skippable(algorithm, batch)
        _assert_apart(algorithm, batch, whole=loss.loss_N.detach())
    empty = algorithm.token_loss(_random_batch(0, lengths=()))
    assert empty.loss_N.shape == (0,), "a rank without work has no tokens: the loss must have none"


def check_advantages(
    kind: type[GroupAlgorithm], loop: Callable[[Sequence[float]], Sequence[float]], *, options: Options | None = None
) -> None:
    """Compare a group algorithm's advantages with those of a plain loop over the known rewards. Samples without a reward must have None.

    Raises `AssertionError`: what differs.
    """
    algorithm = make_algorithm(kind, options=options)
    assert isinstance(algorithm, GroupAlgorithm), f"{kind.__name__} is no GroupAlgorithm"
    rewards: list[list[float | None]] = [
        [0.0, 1.0, 1.0, 0.5],
        [1.0, None, 0.25],
        [0.3, 0.3, 0.3],
        [0.0, 0.0],
        [None, None],
        [-2.0, 1.0],
    ]
    for group in rewards:
        known = [reward for reward in group if reward is not None]
        expected = iter(loop(known) if known else ())
        wanted = [None if reward is None else next(expected) for reward in group]
        got = algorithm.advantages([RewardedSample(reward=reward, turns=(ModelTurn(tokens=3),)) for reward in group])
        assert [a is None for a in got] == [a is None for a in wanted], (
            f"None must stand for samples without a reward: {got} of {group}"
        )
        for found, right in zip(got, wanted, strict=True):
            assert found is None or right is None or abs(found - right) <= 1e-6 * max(1.0, abs(right)), (
                f"advantages of {group} are {got}, the loop has {wanted}"
            )


def _random_batch(seed: int, *, lengths: Sequence[int] = _LENGTHS) -> TokenBatch:
    rng, count = random.Random(seed), sum(lengths)

    def drawn(low: float, high: float) -> torch.Tensor:
        return torch.tensor([rng.uniform(low, high) for _ in range(count)], dtype=torch.float64)

    behaviour_N = drawn(-3.0, -1.0)
    proximal_N = behaviour_N + drawn(-0.4, 0.4)
    return TokenBatch(
        logprobs_N=(proximal_N + drawn(-0.5, 0.5)).requires_grad_(),
        behaviour_N=behaviour_N,
        proximal_N=proximal_N,
        advantages_N=drawn(-1.5, 1.5),
        sequences_N=torch.tensor([n for n, length in enumerate(lengths) for _ in range(length)], dtype=torch.int64),
        reference_N=drawn(-3.0, -0.1),
        kept_N=torch.tensor([rng.random() < _KEPT_SHARE for _ in range(count)], dtype=torch.bool),
    )


def _kept(batch: TokenBatch) -> torch.Tensor:
    assert batch.kept_N is not None, "random batches have a mask"
    return batch.kept_N


def _sequences(algorithm: Algorithm, batch: TokenBatch) -> list[list[Token]]:
    """Of each sequence of the batch its tokens."""
    found, reference_N = algorithm.corrected(batch), batch.reference_N
    assert reference_N is not None, "random batches have a reference"
    sequences: list[list[Token]] = [[] for _ in _LENGTHS]
    for place, sequence in enumerate(batch.sequences_N.tolist()):
        sequences[sequence].append(
            Token(
                logprob=batch.logprobs_N[place],
                behaviour=float(batch.behaviour_N[place]),
                proximal=float(batch.proximal_N[place]),
                reference=float(reference_N[place]),
                anchor=float(found.anchor_N[place]),
                weight=float(found.weight_N[place]),
                advantage=float(batch.advantages_N[place]),
            )
        )
    return sequences


def _assert_skippable(algorithm: Algorithm, batch: TokenBatch) -> None:
    """Check that a group that is skipped, as all of its advantages are 0, has no gradient."""
    if not isinstance(algorithm, GroupAlgorithm) or not algorithm.skips_equal:
        return
    loss = algorithm.token_loss(replace(batch, advantages_N=torch.zeros_like(batch.advantages_N)))
    (got,) = torch.autograd.grad(loss.loss_N.sum(), batch.logprobs_N, allow_unused=True, materialize_grads=True)
    assert not got.any(), (
        "tokens without an advantage have a gradient, and groups of them are skipped: say `skips_equal = False`"
    )


def _assert_apart(algorithm: Algorithm, batch: TokenBatch, *, whole: torch.Tensor) -> None:
    """Each sequence in a pass of its own has the losses that it has among others: micro-batches change nothing."""
    for number in range(len(_LENGTHS)):
        of_it = batch.sequences_N == number
        fields = {name: getattr(batch, name)[of_it] for name in batch.__slots__}
        alone = replace(batch, **{**fields, "sequences_N": torch.zeros_like(fields["sequences_N"])})
        _assert_close(
            algorithm.token_loss(alone).loss_N, whole[of_it], what="losses of a sequence alone and among others"
        )


def _assert_close(got: torch.Tensor, wanted: torch.Tensor, *, what: str) -> None:
    assert got.shape == wanted.shape, f"{what}: {list(got.shape)} numbers, the loop has {list(wanted.shape)}"
    worst = int((got - wanted).abs().argmax())
    assert torch.allclose(got, wanted, rtol=_TOLERANCE, atol=_TOLERANCE), (
        f"{what} differ, most at token {worst}: {got[worst].item():g}, the loop has {wanted[worst].item():g}"
    )
