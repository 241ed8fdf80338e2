"""Questions to the ranker's process: prompts to score, and lengths to learn."""

from streamrl_workers.scheduler.effects import AskRanker, Outbox
from streamrl_workers.scheduler.lengths import Lengths


class RankerQuestions:
    """Sends what the predictor wants to know: an `Extension`."""

    def __init__(self, outbox: Outbox, *, lengths: Lengths) -> None:
        self._outbox = outbox
        self._lengths = lengths

    def settle(self) -> None:
        """Send the questions since the last call."""
        prompts, pairs = self._lengths.take_questions()
        if prompts or pairs:
            self._outbox.add(AskRanker(prompts=prompts, pairs=pairs))
