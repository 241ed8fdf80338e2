"""`rank fit --ranker languageModel`: the model of the ranker's process (`streamrl_workers/ranker`), tuned on pairs at hand.

The folder also keeps pairs that it has learnt: a run that re-tunes it mixes them with its own.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from streamrl_cli.rank.fitted import FitOptions, made_folder
from streamrl_cli.rank.pairs import Pair
from streamrl_workers.ranker import language_model, pairs
from streamrl_workers.ranker.backbone import load_backbone

PASSES = 3


class LanguageModel:
    """A model with a head, and the pairs that it has learnt."""

    def __init__(self, model: language_model.LanguageModel, *, learnt: Sequence[pairs.Pair] = ()) -> None:
        self._model = model
        self._learnt = learnt

    @classmethod
    def fit(cls, known: Sequence[Pair], *, options: FitOptions) -> "LanguageModel":
        """Fine-tune the model that the options name."""
        torch.manual_seed(options.seed)
        model = language_model.LanguageModel.fresh(
            load_backbone(options.model, field="--model"), learning_rate=options.learning_rate
        )
        targets = pairs.standardised([pair.tokens for pair in known])
        examples = [(pair.prompt, target) for pair, target in zip(known, targets, strict=True)]
        passes = options.passes or PASSES
        language_model.exhaust(
            model.tuning(examples, passes=passes, batch_prompts=options.batch_prompts, seed=options.seed)
        )
        learnt = [
            pairs.Pair(prompt=pair.prompt[-pairs.MAX_CHARS :], tokens=pair.tokens, target=target)
            for pair, target in zip(known, targets, strict=True)
        ]
        return cls(model, learnt=learnt[-pairs.MEMORY_PAIRS :])

    def scores(self, prompts: Sequence[str]) -> list[float]:
        """Standardised logarithms of tokens."""
        return self._model.scores(prompts)

    def save(self, path: Path) -> None:
        """The whole folder."""
        folder = made_folder(path)
        pairs.write_pairs(folder / pairs.FILE, self._learnt)
        self._model.save(folder)

    @classmethod
    def load(cls, path: Path) -> "LanguageModel":
        """What `save` wrote. Raises `UserError`."""
        return cls(language_model.LanguageModel.load(path, field="FILE"), learnt=pairs.read_pairs(path / pairs.FILE))
