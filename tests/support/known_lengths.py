"""Predictions of the world around the core: trusted, and known to be right."""

from collections.abc import Sequence

from streamrl_workers.scheduler.lengths import LengthHistory, Lengths, Prediction


class KnownLengths(Lengths):
    """Predicts something for every prompt; trusted as long as `trusted`."""

    def __init__(self) -> None:
        super().__init__(LengthHistory(), signals=())
        self.trusted = True

    def predict(self, key: int, *, siblings: Sequence[int] = ()) -> Prediction:
        return Prediction(tokens=float(key % 97), source="Ranker")


class SureLengths(KnownLengths):
    """Known to be right."""

    def __init__(self) -> None:
        super().__init__()
        self.trusted_signals = frozenset({"History"})

    @property
    def rank_correlation(self) -> float:
        return 1.0
