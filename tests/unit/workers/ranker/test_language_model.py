"""The ranker `languageModel`: it learns and comes back from its folder."""

import shutil
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from streamrl.errors import UserError
from streamrl_cli.ranker import PromptLength
from streamrl_workers.ranker.language_model import LanguageModel, pooled
from streamrl_workers.scheduler.lengths.trust import measure
from support.tiny_folder import tiny_folder
from support.tiny_trainer import VOCABULARY


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_folder(tmp_path_factory.mktemp("model"))
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(folder)
    return folder


def word_pairs(count: int, *, seed: int) -> list[PromptLength]:
    """The tokens follow from how often w5 is in the prompt."""
    draw = Random(seed)
    prompts = [" ".join(f"w{draw.choice((3, 5))}" for _ in range(12)) for _ in range(count)]
    return [PromptLength(prompt=prompt, tokens=2.0 ** prompt.count("5")) for prompt in dict.fromkeys(prompts)]


def fitted_on(pairs: list[PromptLength], model: Path) -> LanguageModel:
    return LanguageModel.fitted(pairs, model=str(model), passes=6, learning_rate=3e-3, batch_prompts=8, seed=0)


def test_it_learns_and_comes_back_from_its_folder(model: Path, tmp_path: Path) -> None:
    learnt, judged = word_pairs(160, seed=1), word_pairs(60, seed=9)
    fitted = fitted_on(learnt, model)
    correlation = measure(fitted.scores([p.prompt for p in judged]), [p.tokens for p in judged]).rank_correlation
    assert (correlation or 0.0) > 0.8
    fitted.save(tmp_path)
    again = LanguageModel.load(tmp_path, field="FOLDER")
    prompts = [pair.prompt for pair in word_pairs(70, seed=2)]
    assert again.scores(prompts) == pytest.approx(fitted.scores(prompts), abs=1e-4)
    prompts = ["w3", "w5 w5 w5 w5 w5 w5 w5", "w3 w5"]
    alone = [fitted.scores([prompt])[0] for prompt in prompts]
    assert fitted.scores(prompts) == pytest.approx(alone, abs=1e-4)


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--model: cannot be loaded: "):
        LanguageModel.of(str(tmp_path), learning_rate=1e-3, field="--model")


def test_a_model_with_code_of_its_own_is_refused_and_the_code_not_run(model: Path, tmp_path: Path) -> None:
    folder, marker = tmp_path / "foreign", tmp_path / "RAN"
    shutil.copytree(model, folder)
    (folder / "foreign.py").write_text(f"import pathlib; pathlib.Path({str(marker)!r}).touch()")
    (folder / "config.json").write_text('{"model_type": "foreign", "auto_map": {"AutoConfig": "foreign.Foreign"}}')
    with pytest.raises(UserError, match="--model: brings code of its own, and none is run"):
        LanguageModel.of(str(folder), learning_rate=1e-3, field="--model")
    assert not marker.exists()


def test_pooling_looks_at_the_prompt_alone() -> None:
    hidden_BTD = torch.tensor([[[1.0], [3.0], [100.0]], [[2.0], [4.0], [9.0]]])
    mask_BT = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert pooled(hidden_BTD, mask_BT).tolist() == [[2.0, 3.0], [5.0, 9.0]]
