"""Predictions that are known to be right."""

from streamrl_workers.scheduler.lengths.predictor import LengthsView
from streamrl_workers.scheduler.lengths.quality import Quality
from support.core_world import KnownLengths


class SureLengths(KnownLengths):
    """Known to be right."""

    def __init__(self) -> None:
        super().__init__()
        self.trusted_signals = frozenset({"History"})

    def view(self) -> LengthsView:
        quality = Quality(pairs=1024, rank_correlation=1.0)
        signals = self.trusted_signals
        return LengthsView(trusted=True, trusted_signals=signals, quality=dict.fromkeys(signals, quality))
