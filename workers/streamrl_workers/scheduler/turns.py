"""One sample's turns with its environment: what was said, what was answered, what comes next.

Owns where turns begin and end among the sample's tokens. Does not own the tokens (`groups.py`), who plays the
environment (the task pool), what becomes of the sample (`production.py`, `evaluation.py`).

Invariants: `segments` cover all tokens of the turns that have ended, in order; `context_tokens` is where the turn under
way begins, so a lost lease goes on with the tokens of that turn that had arrived.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.effects import TurnAnswer


@dataclass(slots=True)
class Turns:
    """Of one sample."""

    completions: list[str] = field(default_factory=list)
    """Text of every turn of the model."""
    segments: list[pb.Segment] = field(default_factory=list)
    context_tokens: int = 0
    """Tokens of the sample before the turn under way, as far as they have been tokenized."""
    observation: str = ""
    """The environment's answer whose tokens have not come yet; it stands behind the context."""
    asked: int | None = None
    """Lease of the turn that is with the environment."""
    reward: float = 0.0
    """Sum over the turns."""

    def observed(self, tokens: int) -> None:
        """A generator has tokenized the observation (0: it has no token, or there was none)."""
        self.observation = ""
        if tokens:
            self.segments.append(pb.Segment(tokens=tokens, observation=True))
            self.context_tokens += tokens

    def end(self, text: str, *, tokens: int, lease: int) -> None:
        """The turn has ended: the sample has `tokens` tokens now, and the environment is asked."""
        self.segments.append(pb.Segment(tokens=tokens - self.context_tokens))
        self.context_tokens = tokens
        self.completions.append(text)
        self.asked = lease

    def answered(self, answer: TurnAnswer) -> None:
        """The environment has answered."""
        self.asked = None
        if not answer.error:
            self.segments[-1].reward = answer.reward
            self.reward += answer.reward
            self.observation = "" if answer.done else answer.observation


def covers(segments: Sequence[pb.Segment], *, tokens: int) -> bool:
    """Whether segments make up so many tokens."""
    return sum(segment.tokens for segment in segments) == tokens
