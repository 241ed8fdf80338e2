"""Text to tokens and back: prompts and observations, stop strings, the length limit, the text of a completion.

Does not own sampling, slots. The samples of a group share their prompt's tokens.
"""

import functools
from typing import Any

from transformers import PreTrainedTokenizerBase

from streamrl_workers.generator.engines.base import FinishReason
from streamrl_workers.generator.engines.hf.batch_state import ActiveSequence

_MAX_PROMPTS = 256
"""Prompts that are kept at most, as tokens and as keys and values."""


class PromptTokens:
    """Tokenizes, and remembers the last prompts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool = True) -> None:
        """`add_special_tokens` False: prompts come from a chat template, which has put them in."""
        self._tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens
        self._kept = functools.lru_cache(maxsize=_MAX_PROMPTS)(self._tokens)

    def of(self, prompt: str) -> tuple[int, ...]:
        """The prompt's tokens, with the special tokens that the tokenizer adds, if so asked."""
        return self._kept(prompt)

    def behind(self, text: str) -> tuple[int, ...]:
        """Tokens of a text that follows other tokens: no special ones are added."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()

    def _tokens(self, prompt: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(prompt, add_special_tokens=self._add_special_tokens)["input_ids"])


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a token decodes to that holds part of a character: it may complete any."""

_WINDOW_TOKENS_PER_CHAR = 4
"""A character takes at most so many tokens (the bytes of UTF-8)."""

_WINDOW_SLACK_TOKENS = 8
"""More, for special tokens in between, which have no text."""


class Stopping:
    """Decides whether the newest token ended a completion."""

    def __init__(self, *, tokenizer: PreTrainedTokenizerBase, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._last_chars: dict[tuple[str, ...], dict[int, bool]] = {}  # by stop strings, by token

    def reason(self, seq: ActiveSequence) -> FinishReason | None:
        """Why the completion has ended with its newest token; None if it has not."""
        token = seq.completion[-1]
        if token in self._end_ids:
            return "stop"
        stop = tuple(seq.request.sampling.stop)
        if stop and self._may_complete(token, stop=stop) and self._completes(seq.turn, stop=stop):
            return "stop"
        return "length" if len(seq.completion) >= seq.limit else None

    def text(self, seq: ActiveSequence) -> str:
        """The text of the completion (without its context), without special tokens, cut before the first stop string."""
        text = self._decode(seq.turn)
        ends = [place for stop in seq.request.sampling.stop if (place := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def _completes(self, completion: list[int], *, stop: tuple[str, ...]) -> bool:
        """Look at the end first: decoding the whole completion at every candidate would be quadratic."""
        longest = max(len(string) for string in stop)
        tail = self._decode(completion[-(longest * _WINDOW_TOKENS_PER_CHAR + _WINDOW_SLACK_TOKENS) :])
        if not any(string in tail for string in stop):
            return False
        text = self._decode(completion)
        return any(string in text for string in stop)

    def _may_complete(self, token: int, *, stop: tuple[str, ...]) -> bool:
        """Whether the token holds the last character of a stop string. Remembered, as decoding is slow."""
        known = self._last_chars.setdefault(stop, {})
        if token not in known:
            # Twice: some tokenizers drop the space before the first token.
            text = self._decode([token, token])
            known[token] = _REPLACEMENT in text or any(string[-1] in text for string in stop)
        return known[token]

    def _decode(self, tokens: list[int]) -> str:
        text: Any = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
