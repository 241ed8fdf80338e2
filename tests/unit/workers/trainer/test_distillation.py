"""Distillation: the gradient in expectation is that of the exact divergence; where it leads on a task that can be enumerated; the teacher in the engine."""

from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.spec import RLJobSpec
from streamrl_workers.models.load import load_model
from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.algorithms.algorithm import TokenBatch
from streamrl_workers.trainer.engines.setup import EngineSetup
from streamrl_workers.trainer.engines.torch_engine import TorchEngine, create
from support.tiny_folder import tiny_folder
from support.trainer_groups import make_group, trainer_spec

TOKENS = 12
CLIPS_NOTHING = {"clipLow": 0.999, "clipHigh": 10.0}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def spec_of(directory: str = "teacher", **options: Any) -> RLJobSpec:
    algorithm = {"teacher": {"path": {"directory": directory}}, **options.pop("algorithm", {})}
    return trainer_spec(rule="distillation", algorithm=algorithm, **options)


def log_policies(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of student and teacher, in float64."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)
    return student, torch.log_softmax(teacher, -1)


def batch_of_all_tokens(logits: torch.Tensor, teacher: torch.Tensor, behaviour: torch.Tensor) -> TokenBatch:
    """Each token of the vocabulary once."""
    logprobs = torch.log_softmax(logits, -1)
    return TokenBatch(
        logprobs_N=logprobs,
        behaviour_N=behaviour,
        proximal_N=logprobs.detach(),
        advantages_N=torch.zeros(TOKENS, dtype=torch.float64),
        sequences_N=torch.arange(TOKENS),
        reference_N=teacher,
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stale", [False, True])
def test_the_expected_gradient_is_that_of_the_reverse_divergence(seed: int, stale: bool) -> None:
    student, teacher = log_policies(seed)
    logits = student.requires_grad_()
    policy = torch.log_softmax(logits, -1)
    (policy.exp() * (policy - teacher)).sum().backward()
    assert logits.grad is not None
    wanted, logits.grad = logits.grad, None
    older = torch.log_softmax(student.detach() * 0.8, -1) if stale else policy.detach()
    algorithm = create_algorithm(spec_of(algorithm=CLIPS_NOTHING, correction={"twoSidedClip": {"cap": 1000.0}}))
    losses = algorithm.token_loss(batch_of_all_tokens(logits, teacher, older)).loss_N
    (older.exp() * losses).sum().backward()  # the expectation over the tokens that the older policy draws
    torch.testing.assert_close(logits.grad, wanted, rtol=1e-9, atol=1e-12)


def test_the_policy_becomes_the_teacher() -> None:
    student, teacher = log_policies(0)
    logits, generator = student.float().requires_grad_(), torch.Generator().manual_seed(0)
    algorithm = create_algorithm(spec_of())
    optimiser = torch.optim.Adam([logits], lr=0.03)
    for _ in range(400):
        policy = torch.log_softmax(logits, -1)
        drawn = torch.multinomial(policy.detach().exp(), 128, replacement=True, generator=generator)
        batch = TokenBatch(
            logprobs_N=policy[drawn],
            behaviour_N=policy[drawn].detach(),
            proximal_N=policy[drawn].detach(),
            advantages_N=torch.zeros(len(drawn)),
            sequences_N=torch.arange(len(drawn)),
            reference_N=teacher[drawn].float(),
        )
        optimiser.zero_grad()
        algorithm.token_loss(batch).loss_N.mean().backward()
        optimiser.step()
    distance = (torch.softmax(logits.detach(), -1) - teacher.exp()).abs().sum() / 2
    assert float(distance) < 0.01


def _engine(folder: Path, **trainer: Any) -> TorchEngine:
    spec = spec_of(**trainer)
    setup = EngineSetup(spec=spec, model_path=str(folder / "student"), base_dir=folder, threads=1)
    return create(setup)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_folder(tmp_path / "student")
    tiny_folder(tmp_path / "teacher", seed=5)
    return tmp_path


@pytest.mark.parametrize("trainer", [{}, {"lora": {"rank": 4}}], ids=["whole", "adapters"])
def test_an_engine_measures_the_divergence_from_the_teacher_on_disk(folder: Path, trainer: dict[str, Any]) -> None:
    """Groups of equal rewards are trained too. Beside adapters the teacher is a model of its own."""
    engine = _engine(folder, **trainer)
    group = make_group(1, rewards=[0.0] * 4)
    engine.begin_step(0, attempt=1)
    engine.add([group])
    metrics = engine.finish_step()
    assert metrics["reference_kl"] == pytest.approx(divergence(folder, group), abs=1e-4)
    assert metrics["forward_tokens"] == metrics["tokens"]
    assert metrics["gradient_norm"] > 0


def divergence(folder: Path, group: Any) -> float:
    """Mean of log policy - log teacher over the drawn tokens, one sample at a time."""
    found: list[float] = []
    student, teacher = (load_model(str(folder / name)).double() for name in ("student", "teacher"))
    for sample in group.samples:
        prompt, tokens = (torch.frombuffer(bytearray(part), dtype=torch.int32).long() for part in (sample.prompt_tokens, sample.tokens))  # fmt: skip
        inputs, rows = torch.cat([prompt, tokens]).unsqueeze(0), torch.arange(len(tokens)) + len(prompt) - 1
        with torch.no_grad():
            says = [torch.log_softmax(model(inputs).logits[0, rows], -1) for model in (student, teacher)]
        found += (says[0] - says[1]).gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    return sum(found) / len(found)
