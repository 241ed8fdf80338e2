"""Rankers that are fitted on pairs at hand, by registry, and their files.

    hashing          a linear model on hashed features of the text (in a run it goes on learning)
    languageModel    a transformers model fine-tuned with a head for the logarithm of tokens
    policyFeatures   hidden states of a frozen model (the policy), all layers, and a ridge regression on them

Owns the registry, and how a file or folder names its ranker. The last two need torch and are imported when asked for;
their folders are what `scheduling.ranker` names, and `ranker.json` in one names its ranker. What any ranker says of a known data set
can also reach a run as a table (`save_scores`).
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from streamrl.errors import UserError
from streamrl_cli.rank.fitted import FitOptions, Fitted
from streamrl_cli.rank.pairs import Pair
from streamrl_workers.ranker.folders import folder_document
from streamrl_workers.scheduler.lengths import prompt_key
from streamrl_workers.scheduler.lengths.rankers import HashingRanker, Ranker, ScoresRanker
from streamrl_workers.scheduler.lengths.rankers.files import read_ranker, write_ranker
from streamrl_workers.scheduler.lengths.rankers.hashing import PASSES


class FittedLight:
    """A ranker that can live in the scheduler: one JSON file."""

    def __init__(self, ranker: HashingRanker | ScoresRanker, *, key: str) -> None:
        self._ranker = ranker
        self._key = key

    def scores(self, prompts: Sequence[str]) -> list[float]:
        """Prompts of which nothing is known score 0, as the mean does."""
        return [self._ranker.score(prompt) or 0.0 for prompt in prompts]

    def save(self, path: Path) -> None:
        """The file that `scheduling.ranker` reads."""
        write_ranker(path, key=self._key, state=self._ranker.state())


def _fit_hashing(pairs: Sequence[Pair], options: FitOptions) -> Fitted:
    ranker = HashingRanker()
    examples = [(pair.prompt, pair.tokens) for pair in pairs]
    ranker.fit(examples, passes=options.passes or PASSES, seed=options.seed)
    return FittedLight(ranker, key="hashing")


def _fit_language_model(pairs: Sequence[Pair], options: FitOptions) -> Fitted:
    from streamrl_cli.rank.language_model import LanguageModel

    return LanguageModel.fit(pairs, options=options)


def _fit_policy_features(pairs: Sequence[Pair], options: FitOptions) -> Fitted:
    from streamrl_cli.rank.policy_features import PolicyFeatures

    return PolicyFeatures.fit(pairs, options=options)


FITTERS: dict[str, Callable[[Sequence[Pair], FitOptions], Fitted]] = {
    "hashing": _fit_hashing,
    "languageModel": _fit_language_model,
    "policyFeatures": _fit_policy_features,
}
_FOLDERS = {
    "languageModel": ("streamrl_cli.rank.language_model", "LanguageModel"),
    "policyFeatures": ("streamrl_cli.rank.policy_features", "PolicyFeatures"),
}
"""Ranker -> module and class that open its folder."""


def fit(key: str, pairs: Sequence[Pair], *, options: FitOptions) -> Fitted:
    """Learn. Raises `UserError` for options that the ranker cannot honour."""
    if key in _FOLDERS and not options.model:
        raise UserError(field="--model", rule=f"must name a transformers model for the ranker {key}")
    if key not in _FOLDERS and options.model:
        raise UserError(
            field="--model", rule=f"has no meaning for the ranker {key}", got=options.model, fix="remove it"
        )
    if key != "languageModel" and options.learning_rate is not None:
        raise UserError(field="--learning-rate", rule="is for languageModel alone", got=options.learning_rate)
    if key == "policyFeatures" and options.passes is not None:
        raise UserError(field="--passes", rule="has no meaning for policyFeatures: it is solved, not iterated")
    return FITTERS[key](pairs, options)


def open_fitted(path: Path) -> Fitted:
    """What `save` wrote, of whichever ranker. Raises `UserError`."""
    if path.is_dir():
        key = _folder_ranker(path)
        module, name = _FOLDERS[key]
        opener = getattr(importlib.import_module(module), name)
        return cast(Fitted, opener.load(path))
    key, ranker = read_ranker(path, field="FILE")
    return FittedLight(_light(ranker), key=key)


def save_scores(path: Path, scores: Mapping[str, float]) -> None:
    """A table for `scheduling.ranker.scores`."""
    table = ScoresRanker({prompt_key(prompt): score for prompt, score in scores.items()})
    write_ranker(path, key="scores", state=table.state())


def _light(ranker: Ranker) -> HashingRanker | ScoresRanker:
    assert isinstance(ranker, HashingRanker | ScoresRanker), "a ranker of the registry without a file of its own"
    return ranker


def _folder_ranker(path: Path) -> str:
    key = folder_document(path).get("ranker")
    if key not in _FOLDERS:
        rule = f"must be a folder that `rank fit` wrote ({', '.join(_FOLDERS)})"
        raise UserError(field="FILE", rule=rule, got=str(path))
    return str(key)
