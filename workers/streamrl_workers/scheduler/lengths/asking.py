"""What the core asks a ranker that takes long, and what it does with the answers.

Owns when there is something to ask. A question goes out with the effects of the event that it came up in; an answer is an event of its own.
"""

from collections.abc import Mapping

from streamrl_workers.scheduler.effects import AskRanker, RankSome
from streamrl_workers.scheduler.parts import Parts


class Asking:
    """Questions out, answers in."""

    def __init__(self, parts: Parts) -> None:
        self._lengths = parts.production.lengths
        self._outbox = parts.outbox
        self._waiting = parts.waiting
        self._is_working = False
        """Whether the shell has been asked to call `work`."""

    def ask(self) -> None:
        """Send out what has come up."""
        prompts, pairs = self._lengths.take_questions()
        if prompts or pairs:
            self._outbox.add(AskRanker(prompts=prompts, pairs=pairs))
        if self._lengths.has_work and not self._is_working:
            self._is_working = True
            self._outbox.add(RankSome())

    def answered(self, scores: Mapping[int, float]) -> None:
        """Answers to AskRanker."""
        self._waiting.renew(self._lengths.ranked(scores))

    def work(self) -> None:
        """Answer to RankSome: one portion."""
        self._is_working = False
        self._waiting.renew(self._lengths.work())
