"""Predictions that are known to be right."""

from support.core_world import KnownLengths


class SureLengths(KnownLengths):
    """Known to be right."""

    def __init__(self) -> None:
        super().__init__()
        self.trusted_signals = frozenset({"History"})

    @property
    def rank_correlation(self) -> float:
        return 1.0
