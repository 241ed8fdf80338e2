"""Past completion lengths by prompt: the signal `History` of length prediction.

Owns the moving means. A prompt is known by a stable hash of its text, so that a data set that comes
round again, a restart and two equal prompts all find the same past. Bounded: the prompts not seen
for the longest time are forgotten.
"""

from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b

WEIGHT = 0.5
"""Weight of the newest group in the moving mean: the policy changes, old lengths mislead."""
MAX_PROMPTS = 65_536
"""About 10 MiB; an endless data set must not fill the memory."""


def prompt_key(text: str) -> int:
    """Stable 63-bit key of a prompt, never 0."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1 or 1


class LengthHistory:
    """Moving mean of completion tokens by prompt key."""

    def __init__(self, means: Mapping[int, float] | None = None, *, max_prompts: int = MAX_PROMPTS) -> None:
        self._max_prompts = max_prompts
        self._means: OrderedDict[int, float] = OrderedDict()
        for key, mean in (means or {}).items():
            self._put(key, mean)

    def learn(self, key: int, *, mean_tokens: float) -> None:
        """One more group of this prompt was `mean_tokens` long on average."""
        known = self._means.get(key)
        self._put(key, mean_tokens if known is None else known + WEIGHT * (mean_tokens - known))

    def known(self, key: int) -> float | None:
        """Expected completion tokens of this prompt; None of one never seen."""
        return self._means.get(key)

    def means(self) -> dict[int, float]:
        """Prompt key -> mean completion tokens, least recently seen first."""
        return dict(self._means)

    def _put(self, key: int, mean: float) -> None:
        self._means.pop(key, None)
        self._means[key] = mean
        if len(self._means) > self._max_prompts:
            self._means.popitem(last=False)
