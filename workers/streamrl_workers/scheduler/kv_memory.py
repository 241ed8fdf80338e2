"""The generators' memory for keys and values, in tokens: what a sample is expected to take, and what each generator has taken.

A sample counts as its prompt and the larger of two: what three of four completions of the run do not exceed (a quarter of
maxTokens before the first), and an eighth more than it has; never more than maxTokens allow. An engine that shares prompts
holds a group's prompt once. The tokens of a prompt that no generator has tokenized are guessed from its characters, first one each.
The prompt of a later context of a sample counts with its completion; the group's, which it no longer needs, stays counted.

Owns estimates and the book of a generator. Does not own who gets what (`assignment.py`), nor what an engine refuses.

Invariant: a generator that holds nothing takes any sample. Only its engine knows whether that fits, and refuses what never will:
so no sample waits for room that cannot come.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from streamrl_workers.scheduler.lengths import Lengths

_TYPICAL_PLACE = 0.75
"""In the distribution of completion lengths. Most samples are far from their end, so their sum stays below it."""
_TYPICAL_SHARE = 0.25
"""Of maxTokens, before a completion has finished."""
_GROWTH = 8
"""A sample of n tokens counts as n + n/8: it is not at its end."""


class KvSize(NamedTuple):
    """Tokens of one sample."""

    prompt: int
    completion: int


@dataclass(slots=True, kw_only=True)
class KvBook:
    """Of one generator."""

    capacity_tokens: int | None
    """None: the engine has no bound."""
    shares_prompts: bool = False
    tokens: int = 0
    """That its samples are expected to take."""
    _sizes: dict[int, KvSize] = field(default_factory=dict)
    """By lease."""
    _prompts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Tokens of a prompt, and leases that hold it. By group where prompts are shared, else by lease."""

    def fits(self, group_id: int, size: KvSize) -> bool:
        """Whether one more sample fits beside the others."""
        if self.capacity_tokens is None or not self._sizes:
            return True
        prompt = 0 if self.shares_prompts and group_id in self._prompts else size.prompt
        return self.tokens + prompt + size.completion <= self.capacity_tokens

    def put(self, lease: int, group_id: int, size: KvSize) -> None:
        """A sample is there, or its size has changed."""
        old = self._sizes.get(lease)
        key = group_id if self.shares_prompts else lease
        known, leases = self._prompts.get(key, (0, 0))
        self.tokens += size.completion - (0 if old is None else old.completion) + size.prompt - known
        self._sizes[lease] = size
        self._prompts[key] = size.prompt, leases + (old is None)

    def remove(self, lease: int, group_id: int) -> None:
        """The sample is gone."""
        self.tokens -= self._sizes.pop(lease).completion
        key = group_id if self.shares_prompts else lease
        known, leases = self._prompts.pop(key)
        if leases > 1:
            self._prompts[key] = known, leases - 1
        else:
            self.tokens -= known


class KvEstimate:
    """What a sample is expected to take."""

    def __init__(self, lengths: Lengths, *, max_tokens: int) -> None:
        self._lengths = lengths
        self._max_tokens = max_tokens
        self._chars = self._tokens = 0
        """Of the prompts that have been tokenized."""

    def learn(self, prompt: str, *, tokens: int) -> None:
        """A generator has tokenized a prompt."""
        self._chars += len(prompt)
        self._tokens += tokens

    def size(self, prompt: str, *, prompt_tokens: int | None, tokens: int, context: int, coming: str = "") -> KvSize:
        """Of a sample with so many tokens so far, of which `context` are earlier turns; `prompt_tokens` None: not known.

        `coming`: the prompt of a later context, which has no tokens yet.
        """
        if prompt_tokens is None:
            prompt_tokens = self._guess(prompt)
        tokens, context = tokens + self._guess(coming), context + self._guess(coming)
        completions = self._lengths.completions
        typical = completions.at(_TYPICAL_PLACE) if len(completions) else self._max_tokens * _TYPICAL_SHARE
        most = max(tokens, context + self._max_tokens)
        return KvSize(prompt_tokens, min(max(int(typical), tokens + tokens // _GROWTH + 1), most))

    def _guess(self, text: str) -> int:
        return -(-len(text) * self._tokens // self._chars) if self._chars else len(text)
