"""Prompts as tokens and as keys and values, shared by the samples of a group.

Owns: tokenizing, and a small cache of what the last prompts' prefill gave. Does not own: slots.
A group's samples may be issued at different times; those that come while their prompt is still here cost
no forward.
"""

from collections import OrderedDict

from transformers import PreTrainedTokenizerBase

from streamrl_workers.generator.engines.hf.slot_cache import Prefilled

_MAX_BYTES = 256 * 2**20
"""Keys and values that are kept beyond their use, at most."""

_MAX_PROMPTS = 256
"""Prompts that are kept at most, as tokens and as keys and values."""


class PromptTokens:
    """Tokenizes, and remembers the last prompts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool = True) -> None:
        """`add_special_tokens` False: prompts come from a chat template, which has put them in."""
        self._tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens
        self._known: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def of(self, prompt: str) -> tuple[int, ...]:
        """The prompt's tokens, with the special tokens that the tokenizer adds, if so asked."""
        if prompt not in self._known:
            self._known[prompt] = tuple(
                self._tokenizer(prompt, add_special_tokens=self._add_special_tokens)["input_ids"]
            )
            if len(self._known) > _MAX_PROMPTS:
                self._known.popitem(last=False)
        self._known.move_to_end(prompt)
        return self._known[prompt]

    def behind(self, text: str) -> tuple[int, ...]:
        """Tokens of a text that follows other tokens: no special ones are added."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()


class PrefillCache:
    """Least-recently-used keys and values by tokens; bounded in number and bytes."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[int, ...], Prefilled] = OrderedDict()
        self._size_bytes = 0

    def get(self, tokens: tuple[int, ...]) -> Prefilled | None:
        """What these tokens' prefill gave, if it is still here."""
        return self._entries.get(tokens)

    def put(self, tokens: tuple[int, ...], prefilled: Prefilled) -> None:
        """Keep a prefill, or mark it as used; the oldest make room. One that exceeds the bound alone is not kept."""
        if tokens not in self._entries:
            self._size_bytes += prefilled.size_bytes
        self._entries[tokens] = prefilled
        self._entries.move_to_end(tokens)
        while self._size_bytes > _MAX_BYTES or len(self._entries) > _MAX_PROMPTS:
            _, dropped = self._entries.popitem(last=False)
            self._size_bytes -= dropped.size_bytes

    def clear(self) -> None:
        """Forget all: the weights have changed."""
        self._entries.clear()
        self._size_bytes = 0
