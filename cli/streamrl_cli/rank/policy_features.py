"""`rank fit --ranker policyFeatures`: a solution on the frozen policy's features (`streamrl_workers/ranker`), for pairs at hand."""

from collections.abc import Sequence
from pathlib import Path

from streamrl.errors import UserError
from streamrl_cli.rank.fitted import FitOptions, made_folder
from streamrl_cli.rank.pairs import Pair
from streamrl_workers.ranker import policy_features
from streamrl_workers.ranker.backbone import load_backbone
from streamrl_workers.ranker.policy_features import MAX_PAIRS


class PolicyFeatures:
    """A frozen model and one weight for each number of each layer."""

    def __init__(self, solved: policy_features.PolicyFeatures) -> None:
        self._solved = solved

    @classmethod
    def fit(cls, known: Sequence[Pair], *, options: FitOptions) -> "PolicyFeatures":
        """Solve for the pairs."""
        if len(known) > MAX_PAIRS:
            raise UserError(
                field="PAIRS.jsonl", rule=f"must have at most {MAX_PAIRS} prompts for policyFeatures", got=len(known)
            )
        solved = policy_features.PolicyFeatures.solved(
            load_backbone(options.model, field="--model"),
            model=options.model,
            prompts=[pair.prompt for pair in known],
            tokens=[pair.tokens for pair in known],
            batch_prompts=options.batch_prompts,
        )
        return cls(solved)

    def scores(self, prompts: Sequence[str]) -> list[float]:
        """Logarithm of the expected tokens, less the mean."""
        return self._solved.scores(prompts)

    def save(self, path: Path) -> None:
        """The folder; it names the model, which is not copied."""
        self._solved.save(made_folder(path))

    @classmethod
    def load(cls, path: Path) -> "PolicyFeatures":
        """What `save` wrote. Raises `UserError`."""
        return cls(policy_features.PolicyFeatures.load(path, field="FILE"))
