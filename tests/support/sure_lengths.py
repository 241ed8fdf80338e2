"""Predictions that are known to be right."""

from streamrl_workers.scheduler.lengths.predictor import LengthsView
from streamrl_workers.scheduler.lengths.quality import Quality
from support.core_world import KnownLengths


class SureLengths(KnownLengths):
    """Known to be right."""

    believed = "History"

    def view(self) -> LengthsView:
        quality = Quality(pairs=1024, rank_correlation=1.0)
        return LengthsView(trusted=True, trusted_signals=frozenset({self.believed}), quality={self.believed: quality})
