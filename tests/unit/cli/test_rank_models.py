"""Rankers with a model of transformers: they learn, come back from their folders, and measure lengths themselves."""

from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from streamrl.errors import UserError
from streamrl_cli.rank.fitted import FitOptions, Fitted
from streamrl_cli.rank.offline import fit, open_fitted
from streamrl_cli.rank.pairs import Pair
from streamrl_cli.rank.sampling import Sampler
from streamrl_workers.ranker.backbone import load_backbone, pooled
from streamrl_workers.ranker.policy_features import RIDGES, solve
from streamrl_workers.scheduler.lengths.quality import rank_correlation
from support.tiny_folder import tiny_folder
from support.tiny_trainer import VOCABULARY


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_folder(tmp_path_factory.mktemp("model"))
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(folder)
    return folder


def word_pairs(count: int, *, seed: int) -> list[Pair]:
    """The tokens follow from how often w5 is in the prompt."""
    draw = Random(seed)
    prompts = [" ".join(f"w{draw.choice((3, 5))}" for _ in range(12)) for _ in range(count)]
    return [Pair(prompt=prompt, tokens=2.0 ** prompt.count("5")) for prompt in dict.fromkeys(prompts)]


def held_out_correlation(fitted: Fitted) -> float:
    pairs = word_pairs(60, seed=9)
    return rank_correlation(fitted.scores([p.prompt for p in pairs]), [p.tokens for p in pairs]) or 0.0


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("languageModel", {"passes": 6, "learning_rate": 3e-3, "batch_prompts": 8}),
        ("policyFeatures", {}),
    ],
)
def test_it_learns_and_comes_back_from_its_folder(
    key: str, options: dict[str, float], model: Path, tmp_path: Path
) -> None:
    fitted = fit(key, word_pairs(160, seed=1), options=FitOptions(model=str(model), **options))
    assert held_out_correlation(fitted) > 0.8
    fitted.save(tmp_path / "folder")
    again = open_fitted(tmp_path / "folder")
    prompts = [pair.prompt for pair in word_pairs(70, seed=2)]
    assert again.scores(prompts) == pytest.approx(fitted.scores(prompts), abs=1e-4)


def test_scores_do_not_depend_on_the_batch(model: Path) -> None:
    fitted = fit("policyFeatures", word_pairs(40, seed=1), options=FitOptions(model=str(model)))
    prompts = ["w3", "w5 w5 w5 w5 w5 w5 w5", "w3 w5"]
    alone = [fitted.scores([prompt])[0] for prompt in prompts]
    assert fitted.scores(prompts) == pytest.approx(alone, abs=1e-4)


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--model: cannot be loaded: "):
        load_backbone(str(tmp_path), field="--model")


def test_a_damaged_folder_is_one_line(model: Path, tmp_path: Path) -> None:
    fit("policyFeatures", word_pairs(30, seed=1), options=FitOptions(model=str(model))).save(tmp_path / "f")
    (tmp_path / "f" / "solution.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match="FILE: cannot be read"):
        open_fitted(tmp_path / "f")


def test_pooling_looks_at_the_prompt_alone() -> None:
    hidden_BTD = torch.tensor([[[1.0], [3.0], [100.0]], [[2.0], [4.0], [9.0]]])
    mask_BT = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert pooled(hidden_BTD, mask_BT).tolist() == [[2.0, 3.0], [5.0, 9.0]]


def test_the_solution_is_that_of_ridge_regression() -> None:
    """Against the primal normal equations with the same ridge, on one layer."""
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    targets_N = x_ND @ torch.tensor([1.0, -2.0, 0.0, 0.5], dtype=torch.float64)
    targets_N = targets_N - targets_N.mean()
    found = solve(x_ND[:, None, :], targets_N)
    standard_ND = (x_ND - x_ND.mean(0)) / x_ND.std(0, unbiased=False)
    scores_N = ((x_ND[:, None, :] - found["mean"]) * found["scale"] * found["weights"]).sum((1, 2))
    ridge = RIDGES[0] * float(standard_ND.square().sum()) / 50
    primal_D = torch.linalg.solve(
        standard_ND.T @ standard_ND + ridge * torch.eye(4, dtype=torch.float64), standard_ND.T @ targets_N
    )
    assert scores_N.tolist() == pytest.approx((standard_ND @ primal_D).tolist(), abs=1e-6)


def test_lengths_are_measured_with_the_engine(model: Path) -> None:
    sampler = Sampler(model, slots=3, max_tokens=8, temperature=1.0, seed=0)
    pairs = list(sampler.pairs(["w3 w5", "w2", "w4 w4 w4"], samples=4))
    assert sorted(pair.prompt for pair in pairs) == sorted(["w3 w5", "w2", "w4 w4 w4"] * 4)
    assert all(1 <= pair.tokens <= 8 for pair in pairs)
    again = Sampler(model, slots=5, max_tokens=8, temperature=1.0, seed=0).pairs(["w3 w5", "w2", "w4 w4 w4"], samples=4)
    assert sorted((p.prompt, p.tokens) for p in again) == sorted((p.prompt, p.tokens) for p in pairs)
